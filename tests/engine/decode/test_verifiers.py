"""Verifiers on hand-made trees, for which every result can be computed on paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_spec_kernels import Filter, using
from torch import Tensor
from transformers import (
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_spec.engine.decode import verifiers as verification
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import RowProcessors
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection, Verifier
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import Readout
from hf_spec.evaluation.lossless.distribution import chi_square
from tests.fake_gpu import DEVICE, OnGpu, held, pretended

VOCAB = 6
ALL_BEST = Readout(best_only=True)


def make_state(prompts: list[list[int]], eos: int | None = None, **options: Any) -> GenerationState:
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    criteria: list[Any] = [MaxLengthCriteria(width + 20)]
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    return GenerationState.create(ids, mask, StopRules(criteria, len(prompts)), **options)


def one_hot(choices: list[int]) -> Tensor:
    """Return (N, VOCAB) logits whose argmax is the given token at each node."""
    return torch.nn.functional.one_hot(torch.tensor(choices), VOCAB) * 10.0


def probabilities(rows: list[list[float]]) -> Tensor:
    """Return (N, VOCAB) logits with these softmax values; missing ones are 0."""
    table = torch.zeros(len(rows), VOCAB)
    for node, row in enumerate(rows):
        table[node, : len(row)] = torch.tensor(row)
    return table.log()


# Root 1 with children 2 and 3; below 2 the tokens 4 and 5, below 3 the token 4.
#            node:  0  1  2  3  4  5
BRANCHED = ([1, 2, 3, 4, 5, 4], [-1, 0, 0, 1, 1, 2])


class TestNodeDraw:
    def test_greedy_walk_follows_the_second_child(self) -> None:
        tree = DraftTree.from_rows([BRANCHED])
        verdict = NodeDraw([], 1).verify(tree, one_hot([3, 0, 4, 0, 0, 5]), make_state([[1]]))
        assert verdict.accepted == [[2, 5]]
        assert verdict.bonus == [5]
        assert verdict.tokens(0) == [3, 4, 5]
        assert verdict.paths == [[2, 5]]

    def test_scores_in_bfloat16_are_processed_in_float32(self) -> None:
        """As in plain `generate()`; in bfloat16 two scores would be equal after this processor."""

        def shift(input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + 100

        logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
        logits[:, 2], logits[:, 4] = 10, 10.0625
        state = make_state([[1]], keep_scores=True)
        verdict = NodeDraw([shift], 1).verify(
            DraftTree.from_rows([([1, 4], [-1, 0])]), logits, state
        )
        assert verdict.accepted == [[1]]
        assert verdict.bonus == [4]
        assert verdict.scores is not None
        assert [score.dtype for score in verdict.scores[0]] == [torch.float32] * 2
        assert verdict.scores[0][0][4] == 110.0625

    def test_a_miss_at_the_root_commits_the_bonus_alone(self) -> None:
        tree = DraftTree.from_rows([BRANCHED])
        verdict = NodeDraw([], 1).verify(tree, one_hot([0] * 6), make_state([[1]]))
        assert verdict.accepted == [[]]
        assert verdict.tokens(0) == [0]

    def test_a_root_without_children_is_plain_decoding(self) -> None:
        tree = DraftTree.from_rows([([1], [-1])])
        assert NodeDraw([], 1).verify(tree, one_hot([4]), make_state([[1]])).tokens(0) == [4]

    def test_of_two_children_with_one_token_the_first_is_taken(self) -> None:
        tree = DraftTree.from_rows([([1, 2, 2], [-1, 0, 0])])
        verdict = NodeDraw([], 1).verify(tree, one_hot([2, 3, 4]), make_state([[1]]))
        assert verdict.accepted == [[1]]
        assert verdict.bonus == [3]

    def test_rows_are_judged_apart_and_finished_ones_not_at_all(self) -> None:
        state = make_state([[1], [1], [1, 1]])
        state.finished[1] = True
        tree = DraftTree.from_rows([([1, 2], [-1, 0]), ([], []), ([1, 2, 3], [-1, 0, 1])])
        verdict = NodeDraw([], 3).verify(tree, one_hot([2, 4, 2, 3, 5]), state)
        assert verdict.accepted == [[1], [], [3, 4]]
        assert verdict.bonus == [4, None, 5]
        assert [verdict.tokens(row) for row in range(3)] == [[2, 4], [], [2, 3, 5]]

    def test_nothing_behind_an_end_of_sequence_is_looked_at(self) -> None:
        seen = []

        def spy(input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(input_ids[0].tolist())
            return scores

        state = make_state([[1]], eos=2)
        tree = DraftTree.from_rows([([1, 2, 3], [-1, 0, 1])])
        verdict = NodeDraw([spy], 1).verify(tree, one_hot([2, 3, 4]), state)
        state.commit(verdict)
        assert state.tokens == [[1, 2]]
        assert seen == [[1]]
        assert state.stats.accepted_tokens == 1

    def test_every_node_is_processed_with_its_own_prefix(self) -> None:
        penalty = RepetitionPenaltyLogitsProcessor(100.0)
        tree = DraftTree.from_rows([([1, 2, 3], [-1, 0, 1])])
        # Without the penalty the target would predict 2 everywhere.
        logits = torch.tensor([[0, 0, 9, 1, 0, 0], [0, 0, 9, 8, 0, 0], [0, 0, 9, 8, 7, 0]]).float()
        assert NodeDraw([penalty], 1).verify(tree, logits, make_state([[1]])).tokens(0) == [2, 3, 4]

    def test_sampling_takes_no_token_of_probability_zero(self) -> None:
        torch.manual_seed(0)
        tree = DraftTree.from_rows([([1, 2], [-1, 0])] * 200)
        state = make_state([[1]] * 200, do_sample=True)
        logits = probabilities([[0.5, 0.5], [1.0]] * 200)
        verdict = NodeDraw([], 200).verify(tree, logits, state)
        assert all(path == [] for path in verdict.accepted)
        assert set(verdict.bonus) == {0, 1}


class TestResidualRejection:
    def tree(self, tokens: list[int], draft: list[float]) -> DraftTree:
        """Return a tree with root 1, whose children were drawn from `draft`."""
        return DraftTree.from_rows(
            [([1, *tokens], [-1] + [0] * len(tokens))],
            draft_probs=probabilities([draft, *[[]] * len(tokens)]).exp(),
        )

    def judge(self, tree: DraftTree, target: list[float], rows: int = 1) -> Verdict:
        logits = probabilities([target, *[[1.0]] * (tree.num_nodes - 1)])
        return ResidualRejection([], rows).verify(tree, logits, make_state([[1]], do_sample=True))

    def uniforms(self, monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
        drawn = iter(values)
        monkeypatch.setattr(
            verification.torch, "rand", lambda shape, **_: torch.full(shape, next(drawn))
        )

    @pytest.mark.parametrize(("uniform", "accepted"), [(0.49, True), (0.51, False)])
    def test_accepts_with_the_ratio_of_the_probabilities(
        self, monkeypatch: pytest.MonkeyPatch, uniform: float, accepted: bool
    ) -> None:
        self.uniforms(monkeypatch, uniform)
        verdict = self.judge(self.tree([0], [0.8, 0.2]), [0.4, 0.6])
        assert verdict.accepted == [[1] if accepted else []]
        if not accepted:
            # All of the residual is on token 1.
            assert verdict.bonus == [1]

    def test_a_uniform_of_zero_does_not_accept_what_the_target_excludes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.uniforms(monkeypatch, 0.0)
        verdict = self.judge(self.tree([0], [0.8, 0.2]), [0.0, 0.0, 1.0])
        assert verdict.accepted == [[]]
        assert verdict.bonus == [2]

    def test_equal_distributions_are_always_accepted(self) -> None:
        torch.manual_seed(0)
        tree = self.tree([0], [0.3, 0.7])
        assert all(self.judge(tree, [0.3, 0.7]).accepted == [[1]] for _ in range(200))

    def test_an_empty_residual_gives_no_nan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A uniform of 1 cannot be drawn; it simulates rounding that rejects although p = q.
        self.uniforms(monkeypatch, 1.0)
        verdict = self.judge(self.tree([0], [0.5, 0.5]), [0.5, 0.5])
        assert verdict.accepted == [[]]
        assert verdict.bonus[0] in (0, 1)

    def test_the_second_sibling_meets_the_residual(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draft, target = [0.5, 0.3, 0.2], [0.2, 0.35, 0.45]
        # After the first is rejected: p = (0, 1/6, 5/6) and q = (0, 0.6, 0.4).
        ratio = (1 / 6) / 0.6
        for uniform, accepted in ((ratio - 0.01, [2]), (ratio + 0.01, [])):
            self.uniforms(monkeypatch, 0.9, uniform)
            verdict = self.judge(self.tree([0, 1], draft), target)
            assert verdict.accepted == [accepted]
        # Then p = (0, 0, 1): only token 2 is left.
        assert verdict.bonus == [2]

    def test_a_draft_of_one_certain_token_draws_from_the_rest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.uniforms(monkeypatch, 0.9)
        verdict = self.judge(self.tree([0], [1.0]), [0.5, 0.0, 0.5])
        assert verdict.bonus == [2]

    def test_without_children_it_draws_from_the_target(self) -> None:
        assert self.judge(self.tree([], [1.0]), [0.0, 0.0, 0.0, 1.0]).bonus == [3]


class TestRowsThatDrawBesideOthers:
    ROWS = 2000
    TARGET = (0.0, 0.1, 0.5, 0.4)

    def said(self, processors: list[Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of greedy rows and of sampled rows for the same scores."""
        torch.manual_seed(0)
        tree = DraftTree.from_rows([([1, 2], [-1, 0])] * self.ROWS)
        logits = probabilities([list(self.TARGET), [0.2, 0.6, 0.2]] * self.ROWS)
        state = make_state([[1]] * self.ROWS)
        state.draws = [row % 2 == 1 for row in range(self.ROWS)]
        before = logits.clone()
        verdict = NodeDraw(processors, self.ROWS).verify(tree, logits, state)
        assert torch.equal(logits, before), "the model's own scores"
        rows = [verdict.tokens(row) for row in range(self.ROWS)]
        return rows[::2], rows[1::2]

    @pytest.mark.parametrize("backend", ["torch", "triton"])
    def test_each_has_its_own_rule(self, backend: str) -> None:
        if backend == "triton":
            self.ROWS = 300
        with using(backend):
            greedy, drawn = self.said([])
        assert greedy == [[2, 1]] * (self.ROWS // 2)
        check_counts([tokens[0] for tokens in drawn], list(self.TARGET))

    def test_with_processors_too(self) -> None:
        greedy, drawn = self.said([TopKLogitsWarper(2)])
        assert greedy == [[2, 1]] * (self.ROWS // 2)
        check_counts([tokens[0] for tokens in drawn], [0.0, 0.0, 0.5 / 0.9, 0.4 / 0.9])

    def test_a_greedy_row_takes_the_first_of_equals(self) -> None:
        state = make_state([[1], [1]])
        state.draws = [False, True]
        tree = DraftTree.from_rows([([1], [-1])] * 2)
        logits = torch.tensor([[0.0, 5.0, 5.0, 0.0, 0.0, 0.0]] * 2)
        found = {NodeDraw([], 2).verify(tree, logits, state).bonus[0] for _ in range(20)}
        assert found == {1}


class TestAllNodesAtOnce:
    """Verification of all nodes in one kernel, as on a GPU; here the kernel is interpreted."""

    ROWS = 1000

    def both(self, rule: type[Verifier], tree: DraftTree, logits: Tensor, **options: Any) -> Any:
        """Return the verdict computed level by level, and the one of all nodes at once."""
        rows = tree.num_rows
        state = make_state([[1]] * rows, **options)
        processors = [InfNanRemoveLogitsProcessor()]
        apart = rule(processors, rows).verify(tree, logits, state)
        with using("triton"):
            return apart, rule(processors, rows).verify(tree, logits, state)

    def test_processors_that_read_no_prefix_are_applied(self) -> None:
        def swap(scores: Tensor) -> Tensor:
            return scores.flip(-1)

        class Swapped(NodeDraw):
            def __init__(self, processors: Any, num_rows: int):
                super().__init__(processors, num_rows)
                step = self.processors._steps[0]
                step.processor = lambda _, scores: swap(scores)

        tree = DraftTree.from_rows([BRANCHED, ([1], [-1])])
        # Counted from the other end of the vocabulary: 3 follows the root, then 4, then 5.
        logits = one_hot([2, 0, 1, 0, 0, 0, 3])
        apart, together = self.both(Swapped, tree, logits)
        assert together.accepted == apart.accepted == [[2, 5], []]
        assert together.bonus == apart.bonus == [5, 2]

    def test_scores_in_bfloat16_are_processed_in_float32(self) -> None:
        class Shifted(NodeDraw):
            def __init__(self, processors: Any, num_rows: int):
                super().__init__(processors, num_rows)
                self.processors._steps[0].processor = lambda _, scores: scores + 100

        # In bfloat16 both sums are 110, and the first of the equal scores would be taken.
        logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
        logits[:, 2], logits[:, 4] = 10, 10.0625
        apart, together = self.both(Shifted, DraftTree.from_rows([([1], [-1])]), logits)
        assert together.bonus == apart.bonus == [4]

    def test_what_lies_behind_an_end_of_sequence_is_cut_off(self) -> None:
        tree = DraftTree.from_rows([BRANCHED])
        apart, together = self.both(NodeDraw, tree, one_hot([3, 0, 4, 0, 0, 5]), eos=3)
        assert together.accepted == apart.accepted == [[2]]
        assert together.bonus == apart.bonus == [3]

    def test_processors_that_read_the_prefix_go_level_by_level(self) -> None:
        penalty = RepetitionPenaltyLogitsProcessor(100.0)
        tree = DraftTree.from_rows([([1, 2, 3], [-1, 0, 1])])
        logits = torch.tensor([[0, 0, 9, 1, 0, 0], [0, 0, 9, 8, 0, 0], [0, 0, 9, 8, 7, 0]]).float()
        with using("triton"):
            verdict = NodeDraw([penalty], 1).verify(tree, logits, make_state([[1]]))
        assert verdict.tokens(0) == [2, 3, 4]

    def test_a_draw_by_node_has_the_distribution_of_the_target(self) -> None:
        torch.manual_seed(0)
        rows = 300
        tree = DraftTree.from_rows([([1, 2], [-1, 0])] * rows)
        logits = probabilities([[0.0, 0.1, 0.5, 0.4], [0.6, 0.2, 0.2]] * rows)
        state = make_state([[1]] * rows, do_sample=True)
        with using("triton"):
            verdict = NodeDraw([], rows).verify(tree, logits, state)
        said = [verdict.tokens(row) for row in range(rows)]
        assert all((tokens[0] == 2) == (len(tokens) == 2) for tokens in said)
        first = [tokens[0] for tokens in said]
        check_counts(first, [0.0, 0.1, 0.5, 0.4])
        check_counts([tokens[1] for tokens in said if len(tokens) == 2], [0.6, 0.2, 0.2])

    @pytest.mark.parametrize("right", [True, False])
    def test_residual_rejection_keeps_the_distribution(
        self, right: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two siblings are drawn without replacement from a distribution far from the target's.

        Tokens are distributed wrongly if `draft_probs` is not what the siblings were drawn from.
        """
        torch.manual_seed(0)
        draft, target = torch.tensor([0.5, 0.3, 0.2, 0, 0, 0]), [0.1, 0.2, 0.3, 0.4]
        children = torch.multinomial(draft.expand(self.ROWS, -1), 2).tolist()
        given = draft if right else torch.full_like(draft, 1 / VOCAB)
        logits = probabilities([target, [1.0], [1.0]] * self.ROWS)
        state = make_state([[1]] * self.ROWS, do_sample=True)
        with pretended(monkeypatch) as gpu:
            tree = DraftTree.from_rows(
                [([1, *pair], [-1, 0, 0]) for pair in children],
                draft_probs=OnGpu(torch.stack([given, draft * 0, draft * 0]).repeat(self.ROWS, 1)),
            )
            verdict = ResidualRejection([], self.ROWS).verify(tree, OnGpu(logits), state)
        assert (gpu.launches, gpu.sends, gpu.fetches, gpu.waits.total()) == (1, 1, 1, 0)
        cells = counted([verdict.tokens(row)[0] for row in range(self.ROWS)], target)
        assert (chi_square(cells).p_value > 1e-6) == right
        kept = [len(nodes) for nodes in verdict.accepted]
        # By hand: sum min(p, q) = 0.5 of the first siblings are kept, plus some second siblings.
        assert (sum(kept) > 0.5 * self.ROWS) or not right

    def test_a_target_that_says_nothing_is_an_error(self) -> None:
        state = make_state([[1]], do_sample=True)
        logits = torch.full((1, VOCAB), -torch.inf)
        with using("triton"), pytest.raises(RuntimeError, match="row 0: no token"):
            NodeDraw([], 1).verify(DraftTree.from_rows([([1], [-1])]), logits, state)


class TestReadout:
    """Verification inside the CUDA graph of the target's step."""

    ROWS = 1000
    PROCESSORS = (TemperatureLogitsWarper(0.8), TopKLogitsWarper(3), TopPLogitsWarper(0.9))

    def verdict(
        self, rule: type[Verifier], processors: Any, tree: DraftTree, logits: Tensor, padding: int
    ) -> Verdict:
        """Return the verdict of a step whose inputs end with `padding`."""
        state = make_state([[1]] * tree.num_rows, do_sample=True)
        state.device = DEVICE
        verifier = rule(processors, tree.num_rows)
        readout = verifier.readout(tree, state)
        assert readout.compute is not None
        tensors = [held(tensor) for tensor in readout.tensors]
        padded = [torch.cat([t, t.new_zeros(padding, *t.shape[1:])]) for t in tensors]
        # The head of a step may run more tokens than there are nodes.
        wide = torch.cat([logits, torch.full((padding + 2, VOCAB), torch.nan)])
        result = readout.compute(OnGpu(wide), [OnGpu(tensor) for tensor in padded])
        return verifier.verify(tree, logits, state, result)

    @pytest.mark.parametrize("right", [True, False])
    def test_tokens_have_the_distribution_behind_all_processors(
        self, right: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(0)
        tree = DraftTree.from_rows([([1, 2], [-1, 0])] * self.ROWS)
        target = probabilities([[0.05, 0.3, 0.25, 0.2, 0.15, 0.05]])
        logits = torch.cat([target, target.flip(1)]).repeat(self.ROWS, 1)
        # The same processors, but top-k keeps one more token.
        wrong = [self.PROCESSORS[0], TopKLogitsWarper(4), *self.PROCESSORS[2:]]
        processors = self.PROCESSORS if right else wrong
        with pretended(monkeypatch) as gpu:
            verdict = self.verdict(NodeDraw, processors, tree, logits, 3)
            assert (gpu.launches, gpu.fetches, gpu.waits.total()) == (2, 1, 0)
        first = [verdict.tokens(row)[0] for row in range(self.ROWS)]
        expected = LogitsProcessorList(self.PROCESSORS)(torch.zeros(1, 1).long(), target)
        probs = expected.softmax(dim=-1)[0].tolist()
        assert 1 < sum(p > 0 for p in probs) < VOCAB
        assert all(
            (token == 2) == (len(verdict.tokens(row)) == 2) for row, token in enumerate(first)
        )
        outside = any(not probs[token] for token in first)
        assert outside != right
        if right:
            check_counts(first, probs)

    @pytest.mark.parametrize("right", [True, False])
    def test_residual_rejection(self, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        draft = torch.tensor([0.0, 0.1, 0.2, 0.7, 0.0, 0.0])
        children = draft.expand(self.ROWS, -1).multinomial(1).tolist()
        target = probabilities([[0.05, 0.3, 0.25, 0.2, 0.15, 0.05]])
        given = draft if right else torch.full_like(draft, 1 / VOCAB)
        tree = DraftTree.from_rows(
            [([1, *child], [-1, 0]) for child in children],
            draft_probs=torch.stack([given, draft * 0]).repeat(self.ROWS, 1),
        )
        logits = target.repeat(2 * self.ROWS, 1)
        with pretended(monkeypatch):
            verdict = self.verdict(ResidualRejection, self.PROCESSORS, tree, logits, 3)
        first = [verdict.tokens(row)[0] for row in range(self.ROWS)]
        expected = LogitsProcessorList(self.PROCESSORS)(torch.zeros(1, 1).long(), target)
        cells = counted(first, expected.softmax(dim=-1)[0].tolist())
        assert (chi_square(cells).p_value > 1e-6) == right

    @pytest.mark.parametrize(
        ("options", "processors"),
        [
            ({"keep_scores": True}, []),
            ({}, [RepetitionPenaltyLogitsProcessor(1.5)]),
            ({}, [TypicalLogitsWarper(0.9)]),
            ({}, [TopKLogitsWarper(3), TemperatureLogitsWarper(0.5)]),
        ],
    )
    def test_other_processors_run_behind_the_step(
        self, options: dict[str, Any], processors: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = make_state([[1]], **options)
        tree = DraftTree.from_rows([([1], [-1])])
        with pretended(monkeypatch):
            assert NodeDraw([], 1).readout(tree, make_state([[1]])) == ALL_BEST
            state.device = DEVICE
            assert NodeDraw(processors, 1).readout(tree, state).compute is None

    def test_rows_of_several_rules_and_filters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Filters are per-node inputs of the step; mixed greedy and sampled rows run after it."""
        rows = RowProcessors(2, lambda row, error: None)
        rows.begin(0, [TopKLogitsWarper(1)])
        rows.begin(1, [TemperatureLogitsWarper(0.5), MinPLogitsWarper(0.2)])
        state = make_state([[1]] * 2, do_sample=True)
        state.device = DEVICE
        tree = DraftTree.from_rows([([1, 2], [-1, 0]), ([1], [-1])])
        with pretended(monkeypatch):
            readout = NodeDraw([rows], 2).readout(tree, state)
            expected = [Filter(top_k=1)] * 2 + [Filter(0.5, min_p=0.2)]
            assert torch.equal(readout.tensors[3], torch.tensor(expected))
            state.draws = [False, True]
            assert NodeDraw([rows], 2).readout(tree, state).compute is None


def counted(tokens: list[int], expected: list[float]) -> list[tuple[float, int]]:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected))
    assert len(counts) == len(expected), "a token of probability 0 was said"
    return [(p * len(tokens), int(n)) for p, n in zip(expected, counts, strict=True) if p]


def check_counts(tokens: list[int], expected: list[float]) -> None:
    assert chi_square(counted(tokens, expected)).p_value > 1e-6


class TestScores:
    def verdict(self, rule: type[Verifier], **options: Any) -> Verdict:
        state = make_state([[1]], do_sample=rule is ResidualRejection, **options)
        draft_probs = probabilities([[0, 0, 1], [0, 0, 0, 1], []]).exp()
        tree = DraftTree.from_rows([([1, 2, 3], [-1, 0, 1])], draft_probs=draft_probs)
        logits = one_hot([2, 4, 5])
        return rule([TopKLogitsWarper(1)], 1).verify(tree, logits, state)

    @pytest.mark.parametrize("rule", [NodeDraw, ResidualRejection])
    def test_one_entry_per_committed_token(self, rule: type[Verifier]) -> None:
        torch.manual_seed(0)
        verdict = self.verdict(rule, keep_scores=True, keep_logits=True)
        assert verdict.tokens(0) == [2, 4]
        assert verdict.scores is not None
        assert verdict.logits is not None
        assert [int(s.argmax()) for s in verdict.scores[0]] == [2, 4]
        assert all(s.isneginf().sum() == VOCAB - 1 for s in verdict.scores[0])
        # Logits are those of the model, before the processors.
        assert torch.equal(torch.stack(verdict.logits[0]), one_hot([2, 4]))
        assert verdict.scores[0][0].dtype == torch.float32

    def test_nothing_is_kept_unasked(self) -> None:
        verdict = self.verdict(NodeDraw)
        assert verdict.scores is None
        assert verdict.logits is None

    def test_a_processor_that_writes_in_place_leaves_logits_alone(self) -> None:
        def ban(input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, 2] = -1e9
            return scores

        state = make_state([[1]], keep_logits=True)
        logits = one_hot([2])
        before = logits.clone()
        verdict = NodeDraw([ban], 1).verify(DraftTree.from_rows([([1], [-1])]), logits, state)
        assert verdict.bonus == [0]
        assert torch.equal(logits, before)
        assert verdict.logits is not None
        assert torch.equal(verdict.logits[0][0], before[0])


@pytest.mark.parametrize("rule", [NodeDraw, ResidualRejection])
def test_a_verifier_is_a_logits_processor(rule: type[Verifier]) -> None:
    users = [RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(3)]
    ids = torch.tensor([[1, 2, 2], [3, 4, 5]])
    scores = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = LogitsProcessorList(users)(ids, scores.clone())
    assert torch.equal(LogitsProcessorList([rule(users, 2)])(ids, scores.clone()), expected)
