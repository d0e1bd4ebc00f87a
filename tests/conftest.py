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

# Without a GPU the kernels run in Triton's interpreter, which has to be chosen before the first
# import of Triton; transformers imports it.
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

# Two processes share the files; what lasts minutes begins while there is other work beside it.
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
    """Put the longest files first, and mark `full` what `tests/tiers.py` says."""
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
    for item in items:
        if item.get_closest_marker("slow") is None:
            if not runs_by_default(item):
                item.add_marker(pytest.mark.full)
        elif item.get_closest_marker("full") is not None:
            raise pytest.UsageError(f"{item.nodeid} is in two tiers: full and slow")


def pytest_collection_finish() -> None:
    """Modules and tests stay: collections of garbage, a sixth of some tests, pass them by."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose tenfold where cores are shared."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("real") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_stored_graphs() -> Iterator[None]:
    """CUDA graphs, and failures to capture them, of neither earlier nor later tests."""
    graph_store.forget()
    yield
    graph_store.forget()


def load_float32(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct: (model, tokenizer)."""
    return load_float32(smollm2_135m_instruct())


@pytest.fixture(scope="session")
def gemma3() -> tuple[Any, Any]:
    """Gemma-3-270M, base model with a sliding window: (model, tokenizer)."""
    return load_float32(gemma3_270m())


@pytest.fixture(scope="session")
def new_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPython]:
    """Runs programs in the root of this checkout, for tests of what an import does."""
    programs = ForkedPython(sys.executable, ROOT, tmp_path_factory.mktemp("streams"), os.environ)
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source archive and the wheel."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def programs(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of an environment with the wheel."""
    return install(built.wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(autouse=True, scope="module")
def shared_models_are_left_bare() -> Iterator[None]:
    """What a file leaves on the models that all share, the tests after it would run with."""
    yield
    assert not left_behind(SHARED)


@pytest.fixture(autouse=True)
def cheap_drafts() -> Iterator[None]:
    """Rounds that cost what a large target's do, the same in every run.

    Drafts whose length is measured would be given up where draft and target are both tiny. Tests
    of the measuring put this aside with a fixture of the same name.
    """
    # Not the fixture `monkeypatch`: used here it would be undone after the fixtures of a test,
    # which may rely on what a test patched being gone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "cached_times", lambda *_: round_costs.RoundTimes())
        patch.setattr(measured, "PLAIN_STEPS", 0)
        patch.setattr(round_costs.RoundTimes, "learn", lambda *_: None)
        patch.setattr(round_costs, "NODE_COST", 1e-4)
        patch.setattr(round_costs, "FORWARD_COST", 0.01)
        patch.setattr(round_costs, "READ_COST", 0.0)
        patch.setattr(DraftModelDrafter, "relative_cost", lambda *_: None)
        yield
