"""The contract of drafters: behavior that all strategies share.

A row in `tests/tiny_models.py` includes a strategy. Strategies that draft chains or save their
assistant to a folder also need a row in `CHAINS` or `SAVED` below. Exact output with every option
and architecture is tested in tests/test_identity.py, batches in tests/test_batches.py,
distributions in tests/test_distribution.py, and statistics in tests/common/test_outputs.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_spec
from hf_spec import AssistantError, UnsupportedError
from hf_spec.adapters.folder import save_adapter
from hf_spec.methods.registry import make_drafter, parse_strategy
from tests import feature_reference, gemma_reference
from tests.adapters.samples import sample
from tests.falcon_reference import random_head
from tests.model_watch import snapshot
from tests.refusals import refuse, small_llama
from tests.tiny_models import (
    PUBLISHED,
    STRATEGIES,
    TIMINGS,
    build,
    disco_adapter,
    pard_model,
    prompts,
    sdsat_adapter,
    speculation,
)

NEW_TOKENS = 12
# The options that make a strategy draft chains.
CHAINS: dict[str, dict[str, Any]] = {
    "lookup": {"max_matches": 1},
    "draft": {},
    "disco": {},
    "tree": {"children": 1},
    "gsd": {"children": 1},
    "pard": {"children": 1},
    "block": {"children": 1},
    "heads": {"children": 1},
    "falcon": {"tree": "chain"},
    "eagle": {"tree": "chain"},
    "mtp": {"tree": "chain"},
    "gemma_assistant": {"tree": "chain"},
    "sdsat": {"num_adaptive": 3},
}
POLICIES = ("static", "heuristic", "confidence", "measured", "disco", None)
HAVE_POLICIES = [
    name
    for name in STRATEGIES
    if name != "disco"
    and "length_policy" in {field.name for field in dataclasses.fields(parse_strategy(name))}
]
WITH_ASSISTANT = [name for name in STRATEGIES if speculation("llama", name).get("assistant")]
# Strategies whose assistants `auto` can use, with their names there; draft models draft trees.
ASKED = {"disco": "disco", "tree": "tree"} | {
    name: name for name in (*PUBLISHED, "falcon", "sdsat")
}


# Functions that save a strategy's assistant. DISCO and EAGLE assistants are folders already.
SAVED: dict[str, Callable[[Path], object]] = {
    "falcon": lambda folder: save_adapter(folder, random_head("llama").to_adapter({})),
    "sdsat": lambda folder: save_adapter(folder, sdsat_adapter("llama")),
    "block": lambda folder: feature_reference.save(folder, feature_reference.deepspec("gated")),
    "heads": lambda folder: feature_reference.save(folder, feature_reference.medusa()),
    "pard": lambda folder: pard_model("llama").save_pretrained(folder),
    "gemma_assistant": lambda folder: gemma_reference.save(
        gemma_reference.published(build("llama")), folder
    ),
}


@cache
def plain(kind: str, eos: int | None = None) -> Tensor:
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": eos}
    return build("llama").generate(**prompts("llama", kind), **given)


def generate(strategy: str, kind: str = "ragged", **options: Any) -> Any:
    """Return the output of a strategy; check that it equals plain `generate()`."""
    call = {**speculation("llama", strategy), **options}
    output = build("llama").generate(
        **prompts("llama", kind),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        **call,
    )
    expected = plain(kind, options.get("eos_token_id"))
    assert output.sequences.tolist() == expected.tolist(), call["spec_strategy"]
    return output


def config_class(strategy: str) -> Any:
    return type(parse_strategy(strategy))


@pytest.mark.parametrize("strategy", CHAINS)
def test_chains(strategy: str) -> None:
    config = config_class(strategy)(**CHAINS[strategy])
    stats = generate(strategy, spec_strategy=config).spec_stats
    # One node per level.
    assert stats.drafted_tokens == sum(stats.drafted_by_position) > 0


@pytest.mark.by_default(strategy=("draft", "tree", "falcon"))
@pytest.mark.parametrize("strategy", HAVE_POLICIES)
def test_every_length_policy(strategy: str) -> None:
    for policy in POLICIES:
        options: dict[str, Any] = {"length_policy": policy, "max_draft_tokens": 3}
        if policy == "disco":
            options["adapter"] = disco_adapter("llama")
        if policy == "confidence":
            options["confidence_threshold"] = 0.15
        config = config_class(strategy)(**options)
        assert generate(strategy, spec_strategy=config).spec_stats.drafted_tokens > 0


@pytest.mark.parametrize("strategy", ASKED)
def test_auto_drafts_with_it(strategy: str) -> None:
    timings = {**TIMINGS, "draft": {ASKED[strategy]: [[1, 0.001]]}}
    output = generate(strategy, spec_strategy=hf_spec.AutoConfig(timings=timings))
    assert output.spec_stats.counters[f"asked_{ASKED[strategy]}"] > 0


@pytest.mark.parametrize("strategy", SAVED)
def test_a_folder_drafts_like_the_object(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "assistant"
    folder.mkdir()
    SAVED[strategy](folder)
    timings = {**TIMINGS, "draft": {strategy: [[1, 0.001]]}}
    given = speculation("llama", strategy)["spec_strategy"]
    for config in (given, hf_spec.AutoConfig(timings=timings)):
        own, read = (
            generate(strategy, spec_strategy=config, **assistant).spec_stats
            for assistant in ({}, {"assistant": str(folder)})
        )
        assert own.drafted_by_position == read.drafted_by_position != []
        assert own.accepted_by_position == read.accepted_by_position


@pytest.mark.parametrize("strategy", PUBLISHED)
def test_more_prompts_than_rows(strategy: str) -> None:
    """For the other strategies, see test_forty_prompts_on_six_slots in tests/test_batches.py."""
    ids, mask = prompts("llama", "ragged").values()
    rows = [line[keep.bool()].tolist() for line, keep in zip(ids, mask, strict=True)]
    outputs = build("llama").generate_batch(
        rows,
        max_batch=2,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        **speculation("llama", strategy),
    )
    new = plain("ragged")[:, ids.shape[1] :].tolist()
    assert [output.generated_tokens for output in outputs.values()] == new
    assert outputs.spec_stats.accepted_tokens > 0


@pytest.mark.parametrize("strategy", PUBLISHED)
def test_rows_that_end_early(strategy: str) -> None:
    """For the other strategies, see the end-of-sequence tests in tests/test_identity.py."""
    said = plain("ragged")[:, -NEW_TOKENS:]
    for eos in said[:3, 5].tolist():
        generate(strategy, eos_token_id=eos)
        lengths = {row.index(eos) if eos in row else NEW_TOKENS for row in said.tolist()}
        assert len(lengths) > 1


def watched(assistant: Any) -> list[nn.Module]:
    """Return the modules of an assistant: itself, or those among its attributes."""
    if isinstance(assistant, nn.Module):
        return [assistant]
    parts = getattr(assistant, "__dict__", {}).values()
    return [part for part in parts if isinstance(part, nn.Module)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models_are_left_as_they_were(strategy: str) -> None:
    """Models are unchanged after a generation and after an exception inside one."""
    modules = [build("llama"), *watched(speculation("llama", strategy).get("assistant"))]

    def fails(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > prompts("llama", "one")["input_ids"].shape[1] + 4:
            raise RuntimeError("enough")
        return scores

    generate(strategy)
    before = [snapshot(module) for module in modules]
    generate(strategy)
    assert [snapshot(module) for module in modules] == before
    with pytest.raises(RuntimeError, match="enough"):
        generate(strategy, "one", logits_processor=[fails])
    assert [snapshot(module) for module in modules] == before
    generate(strategy)


@pytest.mark.parametrize("strategy", [name for name in WITH_ASSISTANT if name != "auto"])
def test_unsuitable_assistants(strategy: str, tmp_path: Path) -> None:
    """The error describes the given assistant and is raised before any forward pass."""
    other = sample("disco" if strategy == "falcon" else "falcon")
    needed = (
        r"pass assistant=" if strategy == "mtp" else f"spec_strategy='{strategy}' needs assistant="
    )
    for wrong, match in (
        (None, needed),
        (7, r"of type int|got int"),
        (nn.Linear(2, 2), r"of type Linear|got Linear"),
        (str(tmp_path), r"is not an? (adapter|published head)|cannot be loaded: Unrecognized"),
        (str(tmp_path / "nowhere"), r"there is no folder .*nowhere"),
        (other, r"method|SpecAdapter|SDSAT adapter's"),
    ):
        refuse(match, error=AssistantError, spec_strategy=strategy, assistant=wrong)


# Draft models fit targets of any size.
@pytest.mark.parametrize("strategy", sorted({*PUBLISHED, "falcon", "sdsat", "disco"} - {"pard"}))
def test_targets_of_another_size(strategy: str) -> None:
    call = speculation("llama", strategy)
    refuse(r"hidden.size.* 16|aux_layers=", error=AssistantError, model=small_llama(), **call)


@pytest.mark.parametrize("strategy", ["falcon", "sdsat", "eagle", "gemma_assistant", "mtp"])
def test_assisted_decoding_of_transformers(strategy: str) -> None:
    """Drafters that read the target's hidden states cannot be candidate generators."""
    call = speculation("llama", strategy)
    drafter = make_drafter(call["spec_strategy"], build("llama"), call["assistant"])
    with pytest.raises(UnsupportedError, match=r"spec_strategy|features|states"):
        drafter.get_candidates(torch.tensor([[3]]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_configs_survive_json(strategy: str) -> None:
    for config in map(parse_strategy, (strategy, speculation("llama", strategy)["spec_strategy"])):
        stored = json.loads(json.dumps(config.to_dict()))
        assert stored["strategy"] == strategy
        assert parse_strategy(stored) == config
