"""Drafts of EAGLE heads inside generate(): every round's tokens, parents and probabilities.

They are compared with a head in plain torch that reads the whole text again for every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_spec import EagleConfig
from hf_spec.common.compat import CACHE_NAME, output_cache
from hf_spec.methods.feature_pairs import runner as pair_runner
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from tests.host_and_device import check_same_drafts
from tests.published_heads import Reference, sample
from tests.tiny_models import VOCAB, build, ragged_batch, repetitive_prompt

KINDS = ["eagle3", "speculators", "eagle", "peagle"]
# One row's committed text and draft: tokens, parents and probabilities.
Round = tuple[list[int], list[int], list[int], list[float]]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Return a list that collects every row's draft with more nodes than the root."""
    found: list[Round] = []
    whole = PairDrafter.draft

    def draft(self: PairDrafter, state: Any, limits: Any) -> Any:
        tree = whole(self, state, limits)
        for row in limits:
            nodes = tree.nodes(row)
            first = nodes[0]
            if len(nodes) > 1:
                assert tree.node_probs is not None
                tokens = [tree.tokens[node] for node in nodes]
                parents = [max(tree.parent[node] - first, -1) for node in nodes]
                probs = [tree.node_probs[node] for node in nodes]
                found.append((list(state.tokens[row]), tokens, parents, probs))
        return tree

    monkeypatch.setattr(PairDrafter, "draft", draft)
    return found


def generate(kind: str, config: EagleConfig, **inputs: Any) -> Any:
    return build("llama").generate(
        **inputs,
        spec_strategy=config,
        assistant=sample(kind).folder,
        do_sample=False,
        return_dict_in_generate=True,
    )


def beam(
    reference: Reference, text: Sequence[int], depth: int, width: int, count: int
) -> dict[tuple[int, ...], float]:
    """Return the paths of EAGLE-2's tree and their probabilities: expand a beam, keep the best."""
    reach: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        level = {}
        for path, chance in frontier.items():
            likely, tokens = reference.probs(text, path).topk(width)
            for token, prob in zip(tokens.tolist(), likely.tolist(), strict=True):
                level[(*path, token)] = chance * prob
        reach.update(level)
        best = sorted(level, key=lambda path: -level[path])[:width]
        frontier = {path: level[path] for path in best}
    kept = sorted(reach, key=lambda path: -reach[path])[:count]
    return {path: reach[path] for path in kept}


def paths_of(found: Round) -> dict[tuple[int, ...], float]:
    """Return the paths of a recorded round and their probabilities."""
    _, tokens, parents, probs = found
    reach: dict[int, tuple[tuple[int, ...], float]] = {0: ((), 1.0)}
    for node in range(1, len(tokens)):
        path, chance = reach[parents[node]]
        reach[node] = ((*path, tokens[node]), chance * probs[node])
    return dict(list(reach.values())[1:])


def same_paths(found: dict[Any, float], expected: dict[Any, float]) -> None:
    assert set(found) == set(expected)
    for path, chance in expected.items():
        assert found[path] == pytest.approx(chance, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_chains(kind: str, rounds: list[Round]) -> None:
    config = EagleConfig(tree="chain", max_draft_tokens=3)
    output = generate(kind, config, **ragged_batch((9, 4, 6)), max_new_tokens=7)
    assert output.spec_stats.draft_forwards > 0
    assert len(rounds) > 6
    reference = sample(kind).reference()
    for one in rounds:
        depth = len(one[1]) - 1
        same_paths(paths_of(one), beam(reference, one[0], depth, 1, depth))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {"tree": "chain"}),
        ("peagle", {"tree": "chain"}),
        ("eagle", {"width": 3, "max_nodes": 9}),
        ("peagle", {"width": 3, "max_nodes": 9}),
    ],
)
def test_drafts_that_nobody_watches(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EagleConfig(max_draft_tokens=4, length_policy="static", **options)
    inputs = {**ragged_batch((9, 4, 6)), "max_new_tokens": 7}
    check_same_drafts(monkeypatch, PairDrafter, lambda: generate(kind, config, **inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_trees(kind: str, rounds: list[Round]) -> None:
    config = EagleConfig(width=3, max_draft_tokens=3, max_nodes=9)
    generate(kind, config, input_ids=repetitive_prompt(9), max_new_tokens=6)
    reference = sample(kind).reference()
    full = [one for one in rounds if len(one[1]) == 10]
    assert len(full) > 1
    for one in full[:2]:
        same_paths(paths_of(one), beam(reference, one[0], 3, 3, 9))


def test_accepted_drafts_are_fed_again(rounds: list[Round]) -> None:
    """Later rounds are correct only if accepted pairs are fed again with the target's features."""
    config = EagleConfig(width=40, max_draft_tokens=2, max_nodes=150)
    output = generate("eagle3", config, input_ids=repetitive_prompt(12), max_new_tokens=14)
    assert output.spec_stats.accepted_tokens > 1
    reference = sample("eagle3").reference()
    for one in rounds[-3:]:
        chances = paths_of(one)
        for path in [path for path in chances if len(path) == 1][:3]:
            expected = float(reference.probs(one[0], ())[path[0]])
            assert chances[path] == pytest.approx(expected, abs=1e-5)


def test_long_prompts_are_fed_in_stretches(
    rounds: list[Round], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a chunk, the next token is the prompt's."""
    monkeypatch.setattr(pair_runner, "FEED_CHUNK", 5)
    monkeypatch.setattr("hf_spec.engine.runner.PREFILL_CHUNK", 7)
    monkeypatch.setattr("hf_spec.engine.runner.STEP_TOKENS", 7)
    config = EagleConfig(tree="chain", max_draft_tokens=2)
    generate("eagle3", config, input_ids=repetitive_prompt(21), max_new_tokens=4)
    reference = sample("eagle3").reference()
    assert rounds
    for one in rounds:
        depth = len(one[1]) - 1
        same_paths(paths_of(one), beam(reference, one[0], depth, 1, depth))


def test_a_reused_cache(rounds: list[Round]) -> None:
    """Pairs begin where states are known; drafts are less accurate, but the output is unchanged."""
    model, prompt = build("llama"), repetitive_prompt(15)
    config = EagleConfig(tree="chain", max_draft_tokens=2)
    cache = output_cache(model(prompt[:, :10], use_cache=True))
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    output = generate("eagle3", config, input_ids=prompt, **{CACHE_NAME: cache}, max_new_tokens=6)
    assert torch.equal(output.sequences, expected)
    reference = sample("eagle3").reference()
    text, tokens, _, _ = rounds[0]
    known = Known(reference, 10)
    assert tokens[1] == int(known.probs(text, ()).argmax())


class Known:
    """Reference that has hidden states only from position `first` on."""

    def __init__(self, reference: Reference, first: int):
        self.reference, self.first = reference, first

    @torch.no_grad()
    def probs(self, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        inner = self.reference
        ids = torch.tensor([list(text)])
        states = inner.model(ids[:, :-1], output_hidden_states=True).hidden_states
        features = inner.fuse([states[layer][0, self.first :] for layer in inner.head.aux])
        output = inner.outputs(ids[0, self.first + 1 :], features)[-1]
        few = inner.read(output).softmax(dim=-1)
        return torch.zeros(VOCAB).index_copy(0, inner.ids(torch.arange(len(few))), few)


def test_passes_of_the_head() -> None:
    step = EagleConfig(tree="chain", max_draft_tokens=3)
    prompt = {"input_ids": repetitive_prompt(9), "max_new_tokens": 5}
    stepwise = generate("eagle3", step, **prompt).spec_stats
    parallel = generate("peagle", step, **prompt).spec_stats
    assert parallel.draft_forwards <= parallel.target_forwards - 1
    assert stepwise.draft_forwards > stepwise.target_forwards
