"""Graph drafting end to end: exact output, merged nodes that are verified and accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_spec
from hf_spec.decoding.graph import TokenGraph, Unmerged
from hf_spec.strategies.draft_model import DraftModelDrafter
from tests.tiny_models import build, ragged_batch, repetitive_prompt

WIDE = {
    "min_probability": 0.0,
    "min_sibling_ratio": 0.0,
    "max_nodes": 60,
    "expanded_per_level": 12,
    "max_draft_tokens": 5,
}


@pytest.mark.parametrize("merge_length", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_greedy_is_identical(name: str, merge_length: int | None) -> None:
    model = build(name)
    config = hf_spec.GsdConfig(merge_length=merge_length, **WIDE)
    draft = hf_spec.truncated_draft(model, 2)
    for inputs in ({"input_ids": repetitive_prompt()}, ragged_batch()):
        options = {**inputs, "max_new_tokens": 20, "do_sample": False}
        expected = model.generate(**options)
        got = model.generate(**options, spec_strategy=config, assistant=draft)
        assert torch.equal(got, expected)


def test_a_path_through_a_merge_edge_is_accepted_and_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The target drafts for itself: every true continuation is in the graph, and a vocabulary this
    # small repeats, so accepted paths run through merge edges sooner or later.
    model = build("llama")
    seen = {"accepted": 0, "dropped": 0}
    observe = DraftModelDrafter.observe

    def watch(self: DraftModelDrafter, verdict: Any, output: Any) -> None:
        for row, sent in self._sent.items():
            path = verdict.paths[row]
            flags = [sent.merged[node] for node in path]
            seen["accepted"] += any(flags)
            observe(self, verdict, output)
            assert self._runner is not None
            committed = len(self._runner_state.tokens[row])
            if any(flags):
                behind = len(path) - flags.index(True)
                seen["dropped"] += committed - 1 - self._runner.stored[row] >= behind

    drafting = DraftModelDrafter.draft

    def remember(self: DraftModelDrafter, state: Any) -> Any:
        self._runner_state = state  # type: ignore[attr-defined]
        return drafting(self, state)

    monkeypatch.setattr(DraftModelDrafter, "observe", watch)
    monkeypatch.setattr(DraftModelDrafter, "draft", remember)
    config = hf_spec.GsdConfig(merge_length=0, children=6, **WIDE)
    options = {"input_ids": repetitive_prompt(), "max_new_tokens": 60, "do_sample": False}
    expected = model.generate(**options)
    got = model.generate(**options, spec_strategy=config, assistant=model)
    assert torch.equal(got, expected)
    assert seen["accepted"] > 0
    assert seen["dropped"] == seen["accepted"]


def test_merging_drafts_fewer_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    draft = hf_spec.truncated_draft(model, 2)
    sizes: list[int] = []
    unmerge = TokenGraph.unmerge

    def weigh(self: TokenGraph, max_nodes: int, max_depth: int) -> Unmerged:
        sizes.append(len(self))
        return unmerge(self, max_nodes, max_depth)

    monkeypatch.setattr(TokenGraph, "unmerge", weigh)
    drafted, sequences = [], []
    for merge_length in (None, 0):
        sizes.clear()
        config = hf_spec.GsdConfig(merge_length=merge_length, children=6, **WIDE)
        output = model.generate(
            repetitive_prompt(),
            max_new_tokens=20,
            do_sample=False,
            spec_strategy=config,
            assistant=draft,
            return_dict_in_generate=True,
        )
        sequences.append(output.sequences)
        drafted.append(sum(sizes) / len(sizes))
    assert torch.equal(*sequences)
    assert drafted[1] < drafted[0]


def test_random_drafts_are_refused() -> None:
    with pytest.raises(hf_spec.OptionError, match="sample_drafts"):
        hf_spec.GsdConfig(sample_drafts=True)
    with pytest.raises(hf_spec.OptionError, match="merge_length"):
        hf_spec.GsdConfig(merge_length=-1)
