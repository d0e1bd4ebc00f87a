"""Reach of draft nodes, trials of a drafter, and merging of drafts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hf_spec.drafting.cost_model.acceptance_stats import (
    LEVEL_PRIOR,
    PRIOR_WEIGHT,
    AcceptanceStats,
    DraftMemory,
)
from hf_spec.drafting.cost_model.draft_source import MAX_UNREAD, DraftSource, MergedTree
from hf_spec.drafting.cost_model.exploration import REST_PER_STEP
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput

ROOT = 5
NOTHING = ForwardOutput(torch.empty(0))

# A root with the children 10 and 20; 11 and 12 below 10, 13 below 11.
TOKENS = [ROOT, 10, 20, 11, 12, 13]
PARENTS = [-1, 0, 0, 1, 1, 3]


class Fixed(Drafter):
    """Drafter that returns the same tree every round and stores the verdicts."""

    def __init__(self, probs: list[float] | None = None, hidden: bool = False):
        self.probs = probs
        self.hidden_layers = (-1,) if hidden else ()
        self.outcomes: list[Verdict] = []
        self.limits: dict[int, int] = {}
        self.restarted: list[int] = []

    def restart(self, row: int) -> None:
        self.restarted.append(row)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        self.limits = dict(limits)
        rows = [(TOKENS, PARENTS) for _ in state.tokens]
        return DraftTree.from_rows(rows, node_probs=self.probs)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        self.outcomes.append(verdict)


def state_of(rows: int = 1) -> GenerationState:
    ids = torch.tensor([[3, 4, ROOT]]).expand(rows, -1)
    return GenerationState.create(ids, torch.ones_like(ids), StopRules([], rows))


def asked(source: DraftSource, depth: int = 3, rows: int = 1) -> DraftSource:
    source.start(rows)
    source.draft(state_of(rows), dict.fromkeys(range(rows), depth))
    return source


def said(*tokens: int) -> Verdict:
    """Return the verdict on a different tree: a chain of all tokens but the last."""
    chain = [ROOT, *tokens[:-1]]
    tree = DraftTree.from_rows([(chain, list(range(-1, len(chain) - 1)))])
    return Verdict(tree, [list(range(1, len(chain)))], [tokens[-1]])


class TestDraftSource:
    def test_reach_by_depth_and_rank(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3, prior={None: (0.6, 0.8)}))
        assert source.reach(0) == pytest.approx([1, 0.6, 0.15, 0.48, 0.12, 0.384])

    def test_reach_by_the_drafters_own_probability(self) -> None:
        source = asked(DraftSource("s", Fixed([1.0, 0.93, 0.07, 0.5, 0.49, 1.0]), 3))
        expected = [1, 0.95, 0.05, 0.95 * 0.55, 0.95 * 0.45, 0.95 * 0.55 * 0.95]
        assert source.reach(0) == pytest.approx(expected)

    def test_nodes_below_the_minimum_reach_are_ignored(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3, prior={None: (0.5, 0.015)}))
        assert source.reach(0) == pytest.approx([1, 0.5, 0.125, 0.0075, 0.5 * 0.00375, 0])
        tree = MergedTree(ROOT)
        tree.add_draft(source, 0)
        assert tree.tokens == [ROOT, 10, 20]

    def test_limits_reach_the_drafter_and_its_own_depth_is_one(self) -> None:
        state, drafter = state_of(2), Fixed()
        source = DraftSource("s", drafter, 3)
        source.start(2)
        source.draft(state, {0: 9, 1: 0})
        assert drafter.limits == {0: 3, 1: 0}
        assert source.limits == {0: 3, 1: 0}
        assert source.sizes == {0: 5}

    def test_it_learns_from_tokens_it_did_not_send(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3))
        before = source.reach(0)
        source.observe(said(10, 12, 99), NOTHING)
        after = source.reach(0)
        weight = 0.95 * PRIOR_WEIGHT
        assert after[1] == pytest.approx((weight * 0.5 + 1) / (weight + 1))
        assert after[2] == pytest.approx(weight * 0.125 / (weight + 1))
        # Token 11 is the first child of 10, token 12 the second.
        assert after[4] / after[1] > before[4] / before[1]
        assert after[3] / after[1] < before[3] / before[1]

    def test_levels(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3))
        assert [source.level_rate(0, depth) for depth in (1, 2, 3)] == [LEVEL_PRIOR] * 3
        source.observe(said(10, 11, 99), NOTHING)
        assert source.level_rate(0, 2) > source.level_rate(0, 1) > LEVEL_PRIOR
        assert source.level_rate(0, 3) < source.level_rate(0, 1)
        source.observe(said(99), NOTHING)
        assert source.level_rate(0, 1) < source.level_rate(0, 2)

    def test_a_chain_has_only_the_first_of_siblings(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3))
        source.observe(said(10, 12, 99), NOTHING)
        assert source.chain_rate(0, 1) == source.level_rate(0, 1) > LEVEL_PRIOR
        # Token 12 is the second child of 10.
        assert source.chain_rate(0, 2) < source.chain_rate(0, 1) < source.level_rate(0, 2)
        before = source.chain_rate(0, 1)
        source.draft(state_of(), {0: 0})
        source.observe(said(10), NOTHING)
        assert source.chain_rate(0, 1) == pytest.approx(before)

    def test_a_level_that_was_asked_for_and_is_not_there_is_a_miss(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3))
        source.observe(said(20, 1), NOTHING)
        assert source.level_rate(0, 2) < source.level_rate(0, 1)
        shallow = asked(DraftSource("s", Fixed(), 3), depth=1)
        shallow.observe(said(20, 1), NOTHING)
        assert shallow.level_rate(0, 2) == shallow.level_rate(0, 1) > LEVEL_PRIOR

    def test_a_level_at_which_a_length_policy_stopped_is_no_miss(self) -> None:
        rates = []
        for policy in (None, LengthPolicy(5)):
            drafter = Fixed()
            drafter.policy = policy  # type: ignore[attr-defined]
            source = asked(DraftSource("s", drafter, 5), depth=5)
            source.observe(said(10, 11, 13, 1, 2), NOTHING)
            rates.append((source.level_rate(0, 3), source.level_rate(0, 4)))
        (third, fourth), (stopped_third, stopped_fourth) = rates
        assert fourth < third
        assert stopped_fourth == stopped_third == third

    def test_kinds_of_drafts_have_rates_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter = Fixed()
        monkeypatch.setattr(drafter, "draft_kind", lambda row: "long")
        prior = {"short": (0.2, 0.5), "long": (0.8, 0.9)}
        source = asked(DraftSource("s", drafter, 3, prior=prior))
        assert source.reach(0)[1] == 0.8
        for _ in range(5):
            source.observe(said(10, 11, 99), NOTHING)
        assert source.reach(0)[1] > 0.8
        monkeypatch.setattr(drafter, "draft_kind", lambda row: "short")
        assert source.reach(0)[1] == 0.2

    def test_the_rates_of_an_idle_drafter_stay_and_change_faster_afterwards(self) -> None:
        state, after = state_of(), []
        for idle in (0, 400):
            source = DraftSource("s", Fixed(), 3)
            source.start(1)
            for _ in range(30):
                source.draft(state, {0: 3})
                source.observe(said(99), NOTHING)
            bad = source.level_rate(0, 1)
            for _ in range(idle):
                source.draft(state, {0: 0})
                source.observe(said(10), NOTHING)
            assert source.level_rate(0, 1) == pytest.approx(bad)
            source.draft(state, {0: 1})
            source.observe(said(10, 99), NOTHING)
            after.append(source.level_rate(0, 1))
        assert after[1] > 2 * after[0]

    def test_unread_text(self) -> None:
        state, source = state_of(2), DraftSource("s", Fixed(), 3)
        for row in (0, 1):
            state.tokens[row] += [7] * MAX_UNREAD
        length = len(state.tokens[0])
        source.start(2)
        assert source.unread(state, [0, 1]) == 2 * length
        source.draft(state, {0: 3, 1: 0})
        assert (source.unread(state, [0]), source.unread(state, [1])) == (0, length)
        # A few new tokens of every row are part of the draft.
        state.tokens[0] += [7] * MAX_UNREAD
        assert source.unread(state, [0, 1]) == length
        state.tokens[0].append(7)
        assert source.unread(state, [0]) == MAX_UNREAD + 1
        source.restart(0)
        assert source.unread(state, [0]) == length + MAX_UNREAD + 1

    def test_a_trial_that_takes_too_much_of_the_rest_waits(self) -> None:
        source = DraftSource("s", Fixed(), 3)
        source.start(1)
        source.explorations[0].idle, source.explorations[0].cost = 1000, 1.0
        rest = 2 * REST_PER_STEP
        assert source.with_trials({0: 0}, {0: 9}, 2.1, rest) == {0: 0}
        assert source.with_trials({0: 0}, {0: 9}, 2.0, rest) == {0: 1}
        assert source.with_trials({0: 0}, {0: 9}, 0.1, rest) == {0: 0}

    def test_a_trial_is_the_deepest_draft_that_takes_one_forward_pass(self) -> None:
        drafter = Fixed()
        assert DraftSource("s", drafter, 8).trial_depth == 1
        drafter.num_forwards = lambda depth: -(-depth // 2)  # type: ignore[method-assign]
        assert DraftSource("s", drafter, 8).trial_depth == 2
        drafter.num_forwards = lambda depth: 1  # type: ignore[method-assign]
        assert DraftSource("s", drafter, 8).trial_depth == 8
        drafter.max_depth = sys.maxsize
        assert DraftSource("s", drafter, sys.maxsize).trial_depth == sys.maxsize

    def test_the_drafter_gets_the_verdict_on_its_own_tree(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3))
        for tokens, path in (((10, 12, 7), [1, 4]), ((8, 9), []), ((10, 11), [1])):
            source.observe(said(*tokens), NOTHING)
            outcome = source.drafter.outcomes[-1]  # type: ignore[attr-defined]
            assert outcome.tree is source.tree
            # The bonus token does not count as accepted, even if it is in the tree.
            assert outcome.accepted == [path]

    def test_a_drafter_that_reads_hidden_states_gets_the_verdict_on_the_tree_that_was_run(
        self,
    ) -> None:
        source = asked(DraftSource("s", Fixed(hidden=True), 3))
        verdict = said(10, 12, 7)
        source.observe(verdict, NOTHING)
        assert source.drafter.outcomes == [verdict]  # type: ignore[attr-defined]

    def test_rows_learn_apart_and_generations_begin_again(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3), rows=2)
        tree = DraftTree.from_rows([([ROOT, 10], [-1, 0]), ([ROOT], [-1])])
        source.observe(Verdict(tree, [[1], []], [11, 99]), NOTHING)
        assert source.reach(0)[1] > 0.5 > source.reach(1)[1]
        kept = source.reach(1)
        source.restart(0)
        assert source.drafter.restarted == [0]  # type: ignore[attr-defined]
        assert source.level_rate(0, 1) == LEVEL_PRIOR > source.level_rate(1, 1)
        assert source.sizes == {1: 5}
        assert source.reach(0)[1] == 0.5
        assert source.reach(1) == kept
        asked(source, rows=2)
        assert source.reach(0) == source.reach(1)


class TestMemory:
    def test_a_generation_begins_with_the_rates_of_earlier_ones(self) -> None:
        memory = DraftMemory(AcceptanceStats.from_prior())
        source = DraftSource("s", Fixed(), 3)
        for _ in range(20):
            source.start(1, memory)
            source.draft(state_of(), {0: 3})
            source.observe(said(99), NOTHING)
        source.start(2, memory)
        assert source.level_rate(0, 1) == source.level_rate(1, 1) < 0.2
        source.draft(state_of(2), {0: 3, 1: 0})
        before = source.level_rate(1, 1)
        tree = DraftTree.from_rows([([ROOT, 10], [-1, 0]), ([ROOT], [-1])])
        source.observe(Verdict(tree, [[1], []], [11, 99]), NOTHING)
        assert source.level_rate(0, 1) > before
        assert source.level_rate(1, 1) == pytest.approx(before)

    def test_a_new_text_shortens_the_wait_for_the_next_trial(self) -> None:
        memory = DraftMemory(AcceptanceStats.from_prior())
        source = DraftSource("s", Fixed(), 3)
        source.start(1, memory)
        source.explorations[0].trials = 4
        source.start(1, memory)
        assert source.explorations[0].trials == 2
        source.restart(0)
        assert source.explorations[0].trials == 1
        source.start(1)
        assert source.explorations[0].trials == 0


class TestMergedTree:
    def merged(self, *values: tuple[float, float]) -> MergedTree:
        tree = MergedTree(ROOT)
        for first, further in values:
            tree.add_draft(asked(DraftSource("s", Fixed(), 3, {None: (first, further)})), 0)
        return tree

    def test_the_same_node_stands_once_with_its_best_value(self) -> None:
        tree = self.merged((0.6, 0.1), (0.3, 0.9))
        assert tree.tokens == TOKENS
        assert tree.parents == PARENTS
        assert tree.best_reach == pytest.approx([1, 0.6, 0.15, 0.27, 0.0675, 0.243])
        for node, parent in enumerate(tree.parents[1:], start=1):
            assert tree.best_reach[node] <= tree.best_reach[parent]

    def test_reach_by_depth(self) -> None:
        tree = self.merged((0.9, 0.8))
        assert tree.reach_by_depth() == pytest.approx([1.0, 0.9, 0.576])
        assert MergedTree(ROOT).reach_by_depth() == []

    def test_kept_nodes(self) -> None:
        tree = self.merged((0.6, 0.8))
        assert tree.subtree([]) == ([ROOT], [-1])
        assert tree.subtree([5, 3, 1]) == ([ROOT, 10, 11, 13], [-1, 0, 1, 2])

    def test_the_row_of_a_batch(self) -> None:
        source = asked(DraftSource("s", Fixed(), 3), rows=2)
        tree = MergedTree(ROOT)
        tree.add_draft(source, 1)
        assert tree.tokens == TOKENS


def test_what_a_source_keeps_of_a_sampled_state_is_nothing() -> None:
    state: Any = state_of()
    state.do_sample = True
    source = asked(DraftSource("s", Fixed(), 3))
    before = torch.get_rng_state()
    source.observe(said(10), NOTHING)
    assert torch.equal(torch.get_rng_state(), before)
