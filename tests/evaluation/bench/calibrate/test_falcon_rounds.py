"""Trees that are sent in part: what is read off whole ones is what the parts bring."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import FalconConfig
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.evaluation.bench.calibrate.falcon_rounds import (
    Rounds,
    best_choice,
    candidates,
    record_rounds,
)
from hf_spec.methods.falcon.drafter import FalconDrafter
from hf_spec.methods.falcon.head import FalconHead
from hf_spec.training.responses import Response
from tests.falcon_reference import random_head
from tests.methods.falcon.test_drafter import BUSHY, knowing_head
from tests.tiny_models import build, repetitive_prompt, settled_prompt

NEW_TOKENS = 24
TREE = RankTree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def response(prompt: Any) -> Response:
    return Response("a", "chat", prompt[0].tolist(), [])


class TestRounds:
    @pytest.mark.parametrize("size", [1, 2])
    def test_chains_have_their_beginnings_as_likeliest_nodes(self, size: int) -> None:
        head = knowing_head(size)
        rounds = record_rounds(
            build("llama"), head, RankTree.chain(3), [response(settled_prompt("llama"))], NEW_TOKENS
        )
        accepted = [len(ranks) for ranks in rounds.ranks]
        assert all(ranks == list(range(len(ranks))) for ranks in rounds.ranks)
        # The last token may come without a draft.
        assert NEW_TOKENS - (sum(accepted) + len(accepted) + 1) in {0, 1}
        assert rounds.tokens(3) == 1 + sum(accepted) / len(accepted)
        assert rounds.tokens(1) == 1 + sum(map(bool, accepted)) / len(accepted)
        assert rounds.draft_seconds > 0

    def test_ranks_are_those_of_the_paths_that_would_be_sent(self) -> None:
        model, prompt = build("llama"), repetitive_prompt()
        for head in (knowing_head(1), random_head("llama", 1, 1)):
            whole = record_rounds(model, head, BUSHY, [response(prompt)], NEW_TOKENS)
            for count in (1, 3, 6, 12):
                found = first_round(head, prompt, count)
                assert found == sum(rank < count for rank in whole.ranks[0])

    def test_a_batch_is_no_matter(self) -> None:
        prompts = [response(repetitive_prompt()), response(settled_prompt("llama"))]
        head = knowing_head(2)
        both = record_rounds(build("llama"), head, TREE, prompts, 12)
        alone = [record_rounds(build("llama"), head, TREE, [one], 12).ranks for one in prompts]
        assert both.ranks == [*alone[0], *alone[1]]


def first_round(head: FalconHead, prompt: Any, count: int) -> int:
    """Accepted nodes of the first draft, of which the `count` likeliest nodes are sent."""
    heard: list[int] = []
    original = FalconDrafter.observe

    def observe(self: FalconDrafter, verdict: Verdict, output: Any) -> None:
        heard.append(len(verdict.accepted[0]))
        original(self, verdict, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FalconDrafter, "observe", observe)
        build("llama").generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            spec_strategy=FalconConfig(tree=BUSHY.paths, max_nodes=count),
            assistant=head,
        )
    # The prompt's own forward comes first, and has no draft.
    return heard[1]


class TestChoice:
    ROUNDS = Rounds(TREE, [[0, 1, 4], [], [2], [0]], draft_seconds=1.0)

    def test_tokens_counted_by_hand(self) -> None:
        assert [self.ROUNDS.tokens(n) for n in range(6)] == [1, 1.5, 1.75, 2, 2, 2.25]

    def test_free_nodes_are_all_sent_and_dear_ones_are_not(self) -> None:
        free = best_choice(self.ROUNDS, lambda nodes: 1.0, 7)
        assert (free.max_nodes, free.tau, free.tokens_per_second) == (5, 1.25, 1.125)
        assert best_choice(self.ROUNDS, lambda nodes: 1.0, 4).max_nodes == 3
        assert best_choice(self.ROUNDS, lambda nodes: 10.0 * nodes, 7).max_nodes == 1
        assert free.summary() == {
            "drafted": 7,
            "depth": 3,
            "sent": 5,
            "tau": 1.25,
            "tokens_per_second": 1.12,
        }

    def test_candidates(self) -> None:
        accepted = {(0,): 0.6, (0, 0): 0.3, (0, 0, 0): 0.2, (1,): 0.1, (0, 0, 0, 0): 0.1}
        found = [tree.paths for tree in candidates(accepted, 2, 4, (2, 9))]
        assert found == [
            ((0,), (0, 0)),
            ((0,), (1,), (0, 0)),
            ((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0)),
        ]
