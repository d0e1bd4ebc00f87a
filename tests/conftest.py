"""Shared fixtures. The real models are loaded once per session, in float32 and evaluation mode."""

# ruff: noqa: E402 - the environment has to be set before torch is imported

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environment import neutralize

# Before the first import of torch, transformers and huggingface_hub.
neutralize(os.environ)

import torch

# Without a GPU the kernels run in Triton's interpreter. It must be enabled before the first import
# of Triton, which transformers imports.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from hf_spec.backend.device import graph_store
from hf_spec.common.small_models import gemma3_270m, smollm2_135m_instruct
from hf_spec.drafting.cost_model import cost_curves as round_costs
from hf_spec.drafting.cost_model import cost_model_drafter as measured
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from tests.forked_python import ForkedPython
from tests.installed import ROOT, Built, build, install
from tests.model_watch import left_behind
from tests.tiers import runs_by_default
from tests.tiny_models import SHARED

# Two processes share the files. Files that take minutes start first, so that both stay busy.
LONGEST = (
    "tests/examples/test_notebooks.py",
    "tests/test_distribution.py",
    "tests/real/test_end_to_end.py",
    "tests/test_identity.py",
    "tests/real/test_smollm2.py",
    "tests/real/test_batches.py",
    "tests/real/test_gemma3.py",
    "tests/real/test_bfloat16.py",
    "tests/real/test_auto.py",
    "tests/real/test_other_tokens.py",
)


# Before pytest deselects by marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and mark tests as `full` by the rules of `tests/tiers.py`."""
    order = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))
    for item in items:
        if item.get_closest_marker("slow") is None:
            if not runs_by_default(item):
                item.add_marker(pytest.mark.full)
        elif item.get_closest_marker("full") is not None:
            raise pytest.UsageError(f"{item.nodeid} is in two tiers: full and slow")


def pytest_collection_finish() -> None:
    """Exempt modules and tests from garbage collection, which takes a sixth of some tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use one thread: tiny tensors gain nothing from more, and run 10x slower on shared cores."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("real") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_stored_graphs() -> Iterator[None]:
    """Clear cached CUDA graphs and capture failures before and after a test."""
    graph_store.forget()
    yield
    graph_store.forget()


def load_float32(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """Return (model, tokenizer) of SmolLM2-135M-Instruct."""
    return load_float32(smollm2_135m_instruct())


@pytest.fixture(scope="session")
def gemma3() -> tuple[Any, Any]:
    """Return (model, tokenizer) of Gemma-3-270M, a base model with a sliding window."""
    return load_float32(gemma3_270m())


@pytest.fixture(scope="session")
def new_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPython]:
    """Yield a runner of programs in the root of this checkout, for tests of imports."""
    programs = ForkedPython(sys.executable, ROOT, tmp_path_factory.mktemp("streams"), os.environ)
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return the source archive and the wheel."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def programs(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the wheel."""
    return install(built.wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(autouse=True, scope="module")
def shared_models_are_left_bare() -> Iterator[None]:
    """Check that no file leaves hooks on the shared models, which would affect later tests."""
    yield
    assert not left_behind(SHARED)


@pytest.fixture(autouse=True)
def cheap_drafts() -> Iterator[None]:
    """Fix round costs to those of a large target, the same in every run.

    With a tiny draft and target, length policies that use measured times would stop drafting. Tests
    of the measurement override this fixture with one of the same name.
    """
    # Not the fixture `monkeypatch`: requested here, it would be undone only after the fixtures of a
    # test, which may rely on the test's own patches being undone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "cached_times", lambda *_: round_costs.RoundTimes())
        patch.setattr(measured, "PLAIN_STEPS", 0)
        patch.setattr(round_costs.RoundTimes, "learn", lambda *_: None)
        patch.setattr(round_costs, "NODE_COST", 1e-4)
        patch.setattr(round_costs, "FORWARD_COST", 0.01)
        patch.setattr(round_costs, "READ_COST", 0.0)
        patch.setattr(DraftModelDrafter, "relative_cost", lambda *_: None)
        yield
