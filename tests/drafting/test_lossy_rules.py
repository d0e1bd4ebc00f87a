"""The two lossy sampling rules: shared code, and each rule against its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import binomtest, chisquare
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_spec import UnsupportedError
from hf_spec.drafting.lossy_rules import IndependentAcceptance, LongestPath, PathSampling
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import Walk
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict


class Chosen(LongestPath):
    """Accepts a fixed set of nodes."""

    nodes: frozenset[int] = frozenset()

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        return {tree.row_start[row] for row in walk.state.unfinished} | self.nodes


#       0
#     1   2
#    3 4   5
#          6
TREE = DraftTree.from_rows([([9, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 2, 5])])


@pytest.mark.parametrize(
    ("accepted", "path"),
    [
        ([], []),
        ([1], [1]),
        ([1, 2, 5], [2, 5]),
        ([1, 3, 2, 5], [1, 3]),
        ([1, 3, 2, 5, 6], [2, 5, 6]),
    ],
)
def test_the_longest_path_is_kept_and_a_bonus_drawn(accepted: list[int], path: list[int]) -> None:
    prompt = torch.tensor([[8, 9]])
    stop = StopRules([MaxLengthCriteria(30)], 1)
    state = GenerationState.create(prompt, torch.ones_like(prompt), stop, do_sample=True)
    rule = Chosen([TemperatureLogitsWarper(0.5)], 1)
    rule.nodes = frozenset(accepted)
    logits = torch.zeros(7, 12)
    logits[:, 11] = 1000.0
    verdict = rule.verify(TREE, logits, state)
    assert verdict.accepted == [path]
    assert verdict.bonus == [11]


def test_a_processor_that_may_remember_is_refused() -> None:
    def unchanged(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    with pytest.raises(UnsupportedError, match="function might remember"):
        Chosen([unchanged], 1)


class TestPathSampling:
    DRAWS = 8_000

    def verdict(self, tokens: list[int], parents: list[int], probs: list[list[float]]) -> Verdict:
        """Verify a tree in `DRAWS` rows."""
        rows = self.DRAWS
        prompt = torch.full((rows, 1), 3)
        stop = StopRules([MaxLengthCriteria(20)], rows)
        state = GenerationState.create(prompt, torch.ones_like(prompt), stop, do_sample=True)
        tree = DraftTree.from_rows([(tokens, parents)] * rows)
        torch.manual_seed(0)
        logits = torch.tensor(probs).log().repeat(rows, 1)
        return PathSampling([], rows).verify(tree, logits, state)

    def shares(self, tokens: list[int], parents: list[int], probs: list[list[float]]) -> Tensor:
        """Return (4,) frequencies of the first token."""
        verdict = self.verdict(tokens, parents, probs)
        first = torch.tensor([verdict.tokens(row)[0] for row in range(self.DRAWS)])
        return torch.bincount(first, minlength=4) / self.DRAWS

    def test_every_level_is_drawn_at_its_own_node(self) -> None:
        half, most = [0.5, 0.3, 0.1, 0.1], [0.1, 0.8, 0.05, 0.05]
        found = self.verdict([3, 0, 1], [-1, 0, 1], [half, most, half])
        lengths = torch.bincount(torch.tensor([len(path) for path in found.paths]), minlength=3)
        expected = torch.tensor([0.5, 0.5 * 0.2, 0.5 * 0.8])
        torch.testing.assert_close(lengths / self.DRAWS, expected, atol=0.025, rtol=0)

    def test_a_child_has_a_second_chance_as_the_bonus(self) -> None:
        half = [0.5, 0.3, 0.1, 0.1]
        found = self.shares([3, 0], [-1, 0], [half, half])
        expected = torch.tensor([0.5 + 0.5 * 0.5, 0.5 * 0.3, 0.5 * 0.1, 0.5 * 0.1])
        torch.testing.assert_close(found, expected, atol=0.025, rtol=0)

    def test_a_child_has_a_chance_for_every_path_through_it(self) -> None:
        half = [0.5, 0.3, 0.1, 0.1]
        # Token 0 has three leaves, all missed with 0.5 ** 3. The virtual node is on no path.
        found = self.shares([3, 0, 0, 1, 2, -1], [-1, 0, 1, 1, 1, 1], [half] * 6)
        missed = 0.5**3
        expected = torch.tensor([1 - missed * 0.5, missed * 0.3, missed * 0.1, missed * 0.1])
        torch.testing.assert_close(found, expected, atol=0.015, rtol=0)


def verdicts(
    tokens: list[int],
    parents: list[int],
    draft: list[float],
    target: list[list[float]],
    rows: int = 1,
    eos: int | None = None,
    processors: Sequence[Any] = (),
) -> Verdict:
    """Apply the lossy rule to a given tree, repeated for `rows` rows."""
    criteria: list[Any] = [MaxLengthCriteria(20)]
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    ids = torch.full((rows, 1), tokens[0])
    stop = StopRules(criteria, rows)
    state = GenerationState.create(ids, torch.ones_like(ids), stop, do_sample=True)
    tree = DraftTree.from_rows([(tokens, parents)] * rows, node_probs=draft * rows)
    logits: Tensor = torch.tensor(target * rows).log()
    return IndependentAcceptance(processors, rows).verify(tree, logits, state)


class TestIndependentAcceptance:
    def test_certain_tokens_are_accepted_and_impossible_ones_are_not(self) -> None:
        torch.manual_seed(0)
        verdict = verdicts(
            [0, 1, 2, 1],
            [-1, 0, 0, 2],
            [1.0, 0.9, 0.1, 0.5],
            [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]],
            rows=50,
        )
        assert verdict.paths == [[2, 3]] * 50
        assert verdict.bonus == [0] * 50

    def test_the_longest_path_wins_and_the_first_of_equals(self) -> None:
        torch.manual_seed(0)
        even = [[0.25] * 4] * 6
        # Draft probabilities are below the target's, so everything is accepted.
        longest = verdicts([0, 1, 2, 3, 1, 2], [-1, 0, 0, 2, 3, 1], [0.1] * 6, even, rows=20)
        assert longest.paths == [[2, 3, 4]] * 20
        equal = verdicts([0, 1, 2, 3, 1], [-1, 0, 0, 2, 1], [0.1] * 5, even[:5], rows=20)
        assert equal.paths == [[2, 3]] * 20

    def test_a_chance_is_the_ratio_of_the_probabilities(self) -> None:
        torch.manual_seed(0)
        rows = 4000
        verdict = verdicts([0, 1], [-1, 0], [1.0, 0.8], [[0.8, 0.2], [1.0, 0.0]], rows=rows)
        accepted = sum(len(path) for path in verdict.paths)
        assert binomtest(accepted, rows, 0.2 / 0.8).pvalue > 1e-6

    def test_the_distribution_that_comes_out(self) -> None:
        torch.manual_seed(0)
        rows, target, draft = 8000, [0.1, 0.2, 0.3, 0.4], {1: 0.5, 2: 0.4}
        chance = {token: min(1.0, target[token] / q) for token, q in draft.items()}
        miss = (1 - chance[1]) * (1 - chance[2])
        expected = [miss * p for p in target]
        expected[1] += chance[1]
        expected[2] += (1 - chance[1]) * chance[2]
        assert math.isclose(sum(expected), 1)
        verdict = verdicts([0, 1, 2], [-1, 0, 0], [1.0, *draft.values()], [target] * 3, rows)
        first = torch.tensor([verdict.tokens(row)[0] for row in range(rows)])
        counts = torch.bincount(first, minlength=4).tolist()
        assert chisquare(counts, [rows * p for p in expected]).pvalue > 1e-6
        assert chisquare(counts, [rows * p for p in target]).pvalue < 1e-9

    def test_nothing_behind_an_end_of_sequence_is_accepted(self) -> None:
        even = [[0.5, 0.5]] * 3
        verdict = verdicts([0, 1, 0], [-1, 0, 1], [0.1] * 3, even, eos=1)
        assert verdict.accepted == [[1]]

    def test_every_node_is_judged_with_its_own_prefix(self) -> None:
        # Two branches of a row must not see each other: 1 may follow 2, but not 1.
        torch.manual_seed(0)
        even = [[0.25] * 4] * 5
        once = [NoRepeatNGramLogitsProcessor(1)]
        tree = [0, 1, 2, 1, 1], [-1, 0, 0, 1, 2]
        verdict = verdicts(*tree, [0.1] * 5, even, rows=20, processors=once)
        assert verdict.paths == [[2, 4]] * 20
        assert set(verdict.bonus) == {3}
