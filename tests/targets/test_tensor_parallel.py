"""`tp_plan="auto"` on two processes: both get the same results as a single process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from hf_spec.drafting.cost_model import adaptive_length_drafter
from tests.refusals import small_llama
from tests.targets import image_cases, two_processes
from tests.targets.cases import SEED, sampled, speculate
from tests.targets.two_processes import ARCHITECTURES, STRATEGIES, continuous, pictures
from tests.tiny_models import build
from tests.training.two_processes import run_together

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.21"),
        reason="older transformers divide no vocabulary of 97 tokens",
    ),
]

CASES = [
    (name, strategy)
    for name in ARCHITECTURES
    for strategy in (STRATEGIES if name == "llama" else STRATEGIES[:3])
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run two processes and return the results of each."""
    folder = tmp_path_factory.mktemp("models")
    for name in ARCHITECTURES:
        build(name).save_pretrained(folder / name)
    image_cases.build("gemma3").save_pretrained(folder / "images")
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
    small_llama(**heads, head_dim=8).save_pretrained(folder / "odd")
    done = run_together(Path(two_processes.__file__), {folder: 2})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture
def fixed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the draft lengths of several processes, which do not depend on timings."""
    monkeypatch.setattr(adaptive_length_drafter, "tensor_parallel_size", lambda model: 2)


def both(ranks: list[dict[str, Any]], case: str) -> Any:
    assert ranks[0][case] == ranks[1][case]
    return ranks[0][case]


@pytest.mark.usefixtures("fixed_sizes")
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_greedy(ranks: list[dict[str, Any]], name: str, strategy: str) -> None:
    found = both(ranks, f"{name} {strategy}")
    one = speculate(build(name), name, strategy, "ragged")
    assert found["tokens"] == found["plain"] == one["plain"]
    assert found["accepted"] == one["accepted"]


def test_prompts_with_images(ranks: list[dict[str, Any]]) -> None:
    found = both(ranks, "images")
    assert found["tokens"] == found["plain"]
    assert found == pictures(image_cases.build("gemma3"))


def test_drafts_were_accepted(ranks: list[dict[str, Any]]) -> None:
    assert all(ranks[0][f"llama {strategy}"]["accepted"] > 0 for strategy in STRATEGIES)


@pytest.mark.usefixtures("fixed_sizes")
@pytest.mark.parametrize("strategy", ["draft", "tree"])
def test_one_seed_in_every_process(ranks: list[dict[str, Any]], strategy: str) -> None:
    """All processes draw the same drafts and acceptances, so they stay in sync."""
    torch.manual_seed(SEED)
    assert both(ranks, f"sampled {strategy}") == sampled(build("llama"), strategy)


@pytest.mark.usefixtures("fixed_sizes")
def test_continuous_batching(ranks: list[dict[str, Any]]) -> None:
    torch.manual_seed(SEED)
    assert both(ranks, "continuous") == continuous(build("llama"))


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("seeds", "same random numbers in every process; call torch.manual_seed"),
        ("inputs", "got different input_ids"),
        ("auto", "auto measures times, which differ among the processes"),
        ("falcon", "offloaded or sharded among processes"),
        ("gated", "use an SDSAT adapter of mode 'embeddings'"),
        ("heads", "3 query heads and 3 key heads, which 2 processes cannot share evenly"),
        ("fsdp", "sharded by FSDP or ZeRO-3.* generate with tp_plan='auto'"),
    ],
)
def test_refused_in_every_process(ranks: list[dict[str, Any]], case: str, match: str) -> None:
    assert re.search(match, both(ranks, case))
