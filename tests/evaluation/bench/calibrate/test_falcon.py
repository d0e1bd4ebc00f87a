"""Falcon tree calibration: acceptance is exact, and the selected tree is drafted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, FalconConfig, OptionError
from hf_spec.adapters.folder import load_adapter, save_adapter
from hf_spec.common.prompts import load_prompts
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.evaluation.bench.calibrate.falcon import (
    Rounds,
    RoundSeconds,
    accepted_paths,
    best_choice,
    bush,
    calibrate_falcon,
    candidates,
    check_answers,
    record_rounds,
    shares_by_rank,
    time_rounds,
    true_ranks,
)
from hf_spec.evaluation.settings import TreeSettings
from hf_spec.methods.falcon.drafter import FalconDrafter, choose_tree
from hf_spec.methods.falcon.head import FalconHead
from hf_spec.methods.falcon.settings import FalconShape
from hf_spec.training.responses import Response
from tests.falcon_reference import random_head
from tests.methods.falcon.test_drafter import BUSHY, knowing_head, watch_drafts
from tests.tiny_models import VOCAB, build, repetitive_prompt, settled_prompt

SETTINGS = TreeSettings(
    depth=4,
    num_ranks=6,
    max_nodes=8,
    drafted_nodes=(6, 12),
    generations=2,
    node_counts=(1, 4, 99),
    new_tokens=8,
    repeats=1,
)
RANKS = torch.tensor([[0, 1, 0], [0, -1, 0], [2, 0, 4], [5, 0, 0]])


def answer(new_tokens: int = 50, prompt: Any = None, name: str = "a") -> Response:
    prompt = settled_prompt("llama") if prompt is None else prompt
    text = build("llama").generate(prompt, max_new_tokens=new_tokens, do_sample=False)[0].tolist()
    count = prompt.shape[1]
    return Response(name, "chat", text[:count], text[count:])


def save(folder: Path, head: FalconHead, **options: Any) -> Path:
    save_adapter(folder, head.to_adapter(options))
    return folder


def calibrate(folder: Path, responses: list[Response], settings: TreeSettings = SETTINGS) -> Any:
    return calibrate_falcon(build("llama"), folder, responses, settings)


class TestAcceptance:
    def test_paths_counted_by_hand(self) -> None:
        found = accepted_paths(RANKS, 3)
        assert found == {(0,): 0.5, (0, 1): 0.25, (0, 1, 0): 0.25, (2,): 0.25, (2, 0): 0.25}
        assert accepted_paths(RANKS, 1) == {(0,): 0.5}
        assert accepted_paths(torch.full((3, 2), -1), 5) == {}

    def test_shares_counted_by_hand(self) -> None:
        # The fourth draft ends at once, the second after one token.
        third = 0.3333
        assert shares_by_rank(RANKS, 3) == [[0.5, 0, 0.25], [third, third, 0], [0.5, 0, 0]]
        assert shares_by_rank(torch.tensor([[-1, 0]]), 2) == [[0, 0], [0, 0]]

    @pytest.mark.by_default(size=(2,))
    @pytest.mark.parametrize("tree", [RankTree.chain(4), BUSHY], ids=["chain", "bushy"])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_ranks_are_those_of_a_real_generation(self, size: int, tree: RankTree) -> None:
        """Following the ranks from root to root gives the rounds of a real generation."""
        new_tokens = 40
        for head, prompt in (
            (knowing_head(size), settled_prompt("llama")),
            (random_head("llama", size, 1), repetitive_prompt()),
        ):
            settings = TreeSettings(depth=tree.height)
            long = answer(new_tokens + tree.height, prompt)
            ranks = true_ranks(head, build("llama"), [long], settings)
            assert ranks.shape == (new_tokens, tree.height)
            position, starts = 1, []
            while position < new_tokens:
                row = ranks[position - 1].tolist()
                room = min(tree.height, new_tokens - position - 1)
                paths = [tuple(row[:depth]) for depth in range(1, room + 1)]
                accepted = sum(path in tree.paths for path in paths)
                starts.append((position - 1, accepted))
                position += accepted + 1
            stats = (
                build("llama")
                .generate(
                    prompt,
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    return_dict_in_generate=True,
                    spec_strategy=FalconConfig(tree=tree.paths),
                    assistant=head,
                )
                .spec_stats
            )
            assert stats.target_forwards == 1 + len(starts)
            assert stats.accepted_tokens == sum(accepted for _, accepted in starts)
            # The predicted and the accepted tokens are equal, except at the end of the text.
            share = accepted_paths(ranks[[start for start, _ in starts]], VOCAB)
            predicted = len(starts) * sum(share.get(path, 0.0) for path in tree.paths)
            # The shares are rounded; their sum over all rounds is a whole number of tokens.
            assert 0 <= round(predicted, 6) - stats.accepted_tokens <= tree.height

    def test_every_place_of_every_answer(self) -> None:
        head, ticks = random_head("llama", 3, 1), []
        # The second is too short; in the third, the first draft has fewer than 3 tokens to read.
        answers = [answer(9), answer(4), answer(9, torch.tensor([[5, 6]]))]
        ranks = true_ranks(head, build("llama"), answers, SETTINGS, lambda: ticks.append(1))
        assert (len(ranks), len(ticks)) == (5 + 4, 3)
        assert (ranks >= 0).all()
        with pytest.raises(OptionError, match="no answer is longer than 4 tokens"):
            true_ranks(head, build("llama"), answers[1:2], SETTINGS)


class TestTime:
    @pytest.mark.parametrize(
        ("num_nodes", "depth", "paths"),
        [
            (1, 2, [(0,)]),
            (2, 2, [(0,), (0, 0)]),
            (5, 3, [(0,), (1,), (2,), (0, 0), (0, 0, 0)]),
            (3, 1, [(0,), (1,), (2,)]),
        ],
    )
    def test_bush(self, num_nodes: int, depth: int, paths: list[Any]) -> None:
        tree = bush(num_nodes, depth)
        assert tree == RankTree.of(paths)
        assert len(tree) == num_nodes

    def test_every_size_and_every_number_of_passes(self) -> None:
        ticks: list[int] = []
        settings = replace(SETTINGS, depth=5, repeats=2)
        prompt = settled_prompt("llama")[0].tolist()
        with watch_drafts() as seen:
            seconds = time_rounds(
                random_head("llama", 2), build("llama"), prompt, settings, lambda: ticks.append(1)
            )
        assert list(seconds.verify) == [1, 4, 8]
        assert list(seconds.draft) == [1, 2, 3]
        assert min(*seconds.verify.values(), *seconds.draft.values()) > 0
        assert len(ticks) == 2 * 6
        assert {passes for *_, passes in seen} == {0, 1, 2, 3}
        assert {tree.num_nodes for tree, *_ in seen} >= {2, 5, 9}

    def test_no_tree_asks_for_more_than_the_vocabulary(self) -> None:
        head = FalconHead(build("llama"), FalconShape(2), torch.arange(5, 8)).eval()
        seconds = time_rounds(head, build("llama"), [5, 6, 7, 8], SETTINGS)
        assert list(seconds.verify) == [1, 3]

    def test_cost_lies_on_straight_lines(self) -> None:
        seconds = RoundSeconds({1: 2.0, 3: 4.0, 7: 4.0}, {1: 0.5, 2: 1.5})
        assert seconds.cost(1, 1) == 2.5
        assert seconds.cost(2, 1) == 3.5
        assert seconds.cost(3, 2) == 5.5
        assert seconds.cost(5, 2) == 5.5
        assert seconds.cost(9, 3) == 4.0 + 2.5
        assert RoundSeconds({4: 2.0}, {1: 1.0}).cost(9, 3) == 3.0


class TestCalibration:
    def test_the_chosen_tree_is_drafted(self, tmp_path: Path) -> None:
        save(tmp_path, knowing_head(2), max_depth=8)
        before = load_adapter(tmp_path)
        answers = [answer(), answer(20, repetitive_prompt(), "b")]
        made = calibrate(tmp_path, answers)
        after = load_adapter(tmp_path)
        assert after.options == json.loads(json.dumps(made.options))
        assert "`falcon`" in (tmp_path / "README.md").read_text()
        for name, tensor in before.tensors.items():
            assert tensor.equal(after.tensors[name])
        assert after.options["max_depth"] == 8
        calibration = after.options["calibration"]
        ranks = true_ranks(
            FalconHead.from_adapter(after, build("llama")), build("llama"), answers, SETTINGS
        )
        share = accepted_paths(ranks, SETTINGS.num_ranks)
        static = RankTree.of(calibration["static"]["tree"])
        assert len(static) <= SETTINGS.max_nodes
        predicted = sum(share[path] for path in static.paths)
        assert calibration["static"]["tau"] == pytest.approx(predicted)
        tree, sent = RankTree.of(after.options["tree"]), after.options["max_nodes"]
        rates = [choice["tokens_per_second"] for choice in calibration["choices"]]
        chosen = calibration["choices"][calibration["best"]]
        assert chosen["tokens_per_second"] == max(rates)
        assert (chosen["drafted"], chosen["sent"]) == (len(tree), sent)
        assert {choice["drafted"] for choice in calibration["choices"]} >= {len(static), 12}
        assert calibration["rounds"] == len(ranks) == 46 + 16
        assert set(calibration["seconds"]["verify"]) == {"1", "4", "8"}
        assert choose_tree("auto", None, FalconHead.from_adapter(after, build("llama"))) == tree
        with watch_drafts() as seen:
            build("llama").generate(
                settled_prompt("llama"),
                max_new_tokens=12,
                do_sample=False,
                spec_strategy=FalconConfig(length_policy="static", max_nodes=None),
                assistant=tmp_path,
            )
        assert seen[1][0].num_nodes == sent + 1

    def test_no_deeper_than_the_head_was_trained_for(self, tmp_path: Path) -> None:
        made = calibrate(save(tmp_path, knowing_head(2), max_depth=1), [answer()])
        assert made.options["calibration"]["depth"] == 1
        assert RankTree.of(made.options["tree"]).height == 1
        save(tmp_path, knowing_head(2), max_depth="6")
        with pytest.raises(AssistantError, match="max_depth='6'"):
            calibrate(tmp_path, [answer()])


class TestRefusals:
    def test_a_head_that_accepts_nothing(self, tmp_path: Path) -> None:
        text = answer()
        strange = sorted({*range(VOCAB)} - {*text.response})
        head = FalconHead(build("llama"), FalconShape(2), torch.tensor(strange)).eval()
        with pytest.raises(OptionError, match="accepts no token drafted"):
            calibrate(save(tmp_path, head), [text])
        assert "tree" not in load_adapter(tmp_path).options

    def test_answers_too_short(self, tmp_path: Path) -> None:
        save(tmp_path, knowing_head(2))
        for answers in ([], [answer(4)]):
            with pytest.raises(OptionError, match="no answer is longer than 4 tokens"):
                calibrate(tmp_path, answers)

    def test_prompts_of_the_benchmark(self, tmp_path: Path) -> None:
        theirs = load_prompts()[7].id
        check_answers([answer()])
        with pytest.raises(OptionError, match=f"'{theirs}' belongs to a benchmark prompt"):
            calibrate(save(tmp_path, knowing_head(2)), [answer(), answer(name=theirs)])

    def test_heads_of_other_models(self, tmp_path: Path) -> None:
        with pytest.raises(AssistantError, match="trained for"):
            calibrate(save(tmp_path, random_head("qwen2")), [answer()])


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
        # The last token may be generated without a draft.
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
    """Return how many nodes of the first draft are accepted if the `count` likeliest are sent."""
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
    # The prefill comes first and has no draft.
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
