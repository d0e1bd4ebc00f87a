"""The cost model end to end: exact output, and drafts that follow costs and acceptance rates."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import hf_spec
from hf_spec import DraftConfig
from hf_spec.backend.device import clock
from hf_spec.backend.device.capture import warm_ups
from hf_spec.common.errors import UnsupportedError
from hf_spec.drafting.cost_model import cost_curves as round_costs
from hf_spec.drafting.cost_model import cost_model_drafter as measured
from hf_spec.drafting.cost_model.cost_curves import RoundTimes
from hf_spec.drafting.cost_model.cost_model_drafter import Bounds, CostModelDrafter
from hf_spec.drafting.cost_model.draft_source import DraftSource
from hf_spec.drafting.cost_model.round_timer import RoundTimer
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.registry import make_drafter
from tests.drafting.cost_model.calls import NAMES, NEW_TOKENS, assistant, generate
from tests.falcon_reference import random_head
from tests.tiny_models import build, draft_model, prompts


class TestOutput:
    @pytest.mark.by_default(name=("lookup", "tree", "falcon"))
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        ("pairs", "kind"), [((0.0, 0.0), "ragged"), ((0.02, 0.1), "ragged"), ((0.5, 0.9), "one")]
    )
    def test_greedy_is_plain_at_any_cost(
        self, name: str, kind: str, pairs: tuple[float, float], costs: Any
    ) -> None:
        costs(*pairs)
        plain = build("llama").generate(
            **prompts("llama", kind), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert torch.equal(generate(name, assistant(name), kind).sequences, plain)

    @pytest.mark.parametrize("name", NAMES)
    def test_greedy_is_plain_with_the_times_of_this_machine(self, name: str) -> None:
        plain = build("llama").generate(
            **prompts("llama", "ragged"), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        for _ in range(2):
            assert torch.equal(generate(name, assistant(name), "ragged").sequences, plain)


class TestCosts:
    @pytest.mark.parametrize("name", ["draft", "tree", "gsd"])
    def test_a_perfect_draft_is_as_long_as_it_is_cheap(self, name: str, costs: Any) -> None:
        def mean_length(forward: float) -> float:
            costs(0.001, forward)
            stats = generate(name, build("llama"), max_new_tokens=60).spec_stats
            return stats.accepted_tokens / stats.target_forwards

        cheap, expensive, hopeless = mean_length(0.01), mean_length(0.5), mean_length(1.2)
        assert cheap > max(1.0, expensive)
        assert hopeless == 0

    @pytest.mark.parametrize("name", ["tree", "gsd", "falcon", "lookup"])
    def test_fewer_nodes_are_sent_where_they_are_expensive(self, name: str, costs: Any) -> None:
        def nodes(cost: float) -> float:
            costs(cost, 0.01)
            stats = generate(name, assistant(name)).spec_stats
            return stats.drafted_tokens / stats.target_forwards

        assert nodes(0.0) > nodes(0.3)
        assert nodes(3.0) == 0

    def test_a_draft_that_fails_is_given_up(self, costs: Any) -> None:
        costs(0.01, 0.6)
        worthless = generate("draft", draft_model("llama", 1), max_new_tokens=60).spec_stats
        assert worthless.counters["idle_rounds"] > worthless.counters["rounds"] // 2


class TestTimes:
    def test_no_forward_is_spent_on_measuring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs: list[object] = []
        forward = ModelRunner.forward

        def watch(self: ModelRunner, *arguments: Any, **options: Any) -> Any:
            runs.append(self.model)
            return forward(self, *arguments, **options)

        monkeypatch.setattr(ModelRunner, "forward", watch)
        stats = generate("draft", draft_model("llama")).spec_stats
        target = [model for model in runs if model is build("llama")]
        assert len(target) == stats.target_forwards == stats.counters["rounds"]
        assert len(runs) - len(target) == stats.draft_forwards

    def test_what_is_learned_is_the_time_of_the_parts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learned: list[tuple[float, float, dict[str, tuple[int, int, float]]]] = []
        monkeypatch.setattr(measured, "cached_times", lambda *_: round_costs.RoundTimes())
        monkeypatch.setattr(RoundTimes, "learn", lambda _, *times: learned.append(times))
        ticks = itertools.count()
        monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
        monkeypatch.setattr(DraftModelDrafter, "relative_cost", lambda *_: 0.1)
        stats = generate("draft", draft_model("llama")).spec_stats
        # The first round is the prefill and is not timed.
        assert len(learned) == stats.target_forwards - 1
        drafts = [spent["draft"] for *_, spent in learned if "draft" in spent]
        assert all(verify > 0 for _, verify, _ in learned)
        assert all(seconds > 0 for *_, seconds in drafts)
        assert max(nodes for nodes, *_ in learned) > 1
        assert 0 < sum(forwards for forwards, *_ in drafts) <= stats.draft_forwards

    def test_a_round_with_a_new_prompt_is_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learned: list[int] = []
        monkeypatch.setattr(RoundTimes, "learn", lambda *_: learned.append(1))
        output = build("llama").generate_batch(
            [[5, 6, 7, 5, 6], [8, 9, 10], [5, 6, 7]],
            max_new_tokens=4,
            spec_strategy="lookup",
            max_batch=1,
        )
        assert len(output) == 3
        assert 0 < len(learned) <= 3 * 3

    def test_drafts_follow_the_time_that_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A draft model as slow as the target is dropped, although it is always right."""
        now = [0.0]
        forward = ModelRunner.forward

        def slow(self: ModelRunner, *arguments: Any, **options: Any) -> Any:
            now[0] += 1.0
            return forward(self, *arguments, **options)

        monkeypatch.setattr(measured, "cached_times", lambda *_: round_costs.RoundTimes())
        monkeypatch.setattr(ModelRunner, "forward", slow)
        monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
        stats = generate("draft", build("llama"), max_new_tokens=60).spec_stats
        assert stats.counters["idle_rounds"] > 40


class Machine:
    """Clock driven by forward passes: a target step takes 1, each further node `node`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node: float, forward: float):
        self.now = 0.0
        run = ModelRunner.forward

        def slow(runner: ModelRunner, tree: Any, *arguments: Any, **options: Any) -> Any:
            is_target = runner.model is build("llama")
            self.now += 1.0 + node * (tree.num_nodes - 1) if is_target else forward
            return run(runner, tree, *arguments, **options)

        times = RoundTimes()
        monkeypatch.setattr(measured, "cached_times", lambda *_: times)
        monkeypatch.setattr(ModelRunner, "forward", slow)
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)

    def lost(self, given: Any, strategy: Any = "auto", new_tokens: int = 100) -> tuple[float, Any]:
        """Return the time lost against plain decoding, in plain steps, and the statistics."""
        start = self.now
        stats = generate(strategy, given, max_new_tokens=new_tokens).spec_stats
        return self.now - start - new_tokens, stats


class TestLosses:
    @pytest.mark.by_default(strategy=("auto", "tree"))
    @pytest.mark.parametrize("strategy", ["auto", "draft", "tree", "gsd"])
    def test_drafts_that_never_pay_are_given_up_within_the_bound(
        self, strategy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong, forward = hf_spec.truncated_draft(build("llama", seed=5), 1), 0.2
        machine = Machine(monkeypatch, 0.04, forward)
        lost = [machine.lost(wrong, strategy) for _ in range(3)]
        # `auto` also measures the cost of lookup nodes.
        assert lost[0][0] <= (4.5 if strategy == "auto" else 2.5)
        assert all(steps <= 1.0 for steps, _ in lost[1:])
        for _, stats in lost:
            # The output of a tiny model is repetitive, so lookups pay off.
            asked = stats.counters["asked_tree" if strategy == "auto" else f"asked_{strategy}"]
            assert 1 <= asked <= 8

    def test_drafts_that_begin_to_pay_are_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drafting resumes after a bad start."""
        machine = Machine(monkeypatch, 0.02, 0.3)
        right = copy.deepcopy(build("llama"))
        observe = DraftSource.observe

        def mislead(self: DraftSource, verdict: Any, output: Any) -> None:
            """Count 20 rejected drafts in the first round with a draft."""
            observe(self, verdict, output)
            if self.limits.get(0) and not misled:
                misled.append(True)
                for _ in range(20):
                    self._stats[0].levels.count(1, False)

        misled: list[bool] = []
        monkeypatch.setattr(DraftSource, "observe", mislead)
        steps, stats = machine.lost(right, "draft", 200)
        assert stats.counters["idle_rounds"] > 10
        assert steps < -30

    def test_what_was_learned_is_not_learned_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = hf_spec.truncated_draft(build("llama", seed=5), 1)
        machine = Machine(monkeypatch, 0.04, 0.2)
        asked = [machine.lost(wrong)[1].counters["asked_tree"] for _ in range(3)]
        assert asked[0] >= 1
        assert asked[2] <= asked[0]

    @pytest.mark.parametrize("strategy", ["auto", "draft", "tree", "gsd"])
    def test_drafts_that_pay_are_made(self, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        right = copy.deepcopy(build("llama"))
        machine = Machine(monkeypatch, 0.02, 0.05)
        monkeypatch.setattr(DraftModelDrafter, "relative_cost", lambda *_: 0.1)
        steps, stats = machine.lost(right, strategy)
        assert steps < -40
        assert stats.counters["idle_rounds"] < stats.counters["rounds"] / 3

    def test_plain_steps_are_measured_before_anything_is_drafted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[float] = []
        learn = RoundTimes.learn

        def watch(times: RoundTimes, nodes: float, *arguments: Any) -> None:
            sizes.append(nodes)
            learn(times, nodes, *arguments)

        monkeypatch.setattr(RoundTimes, "learn", watch)
        machine = Machine(monkeypatch, 0.02, 0.05)
        monkeypatch.setattr(DraftModelDrafter, "relative_cost", lambda *_: 0.1)
        right = copy.deepcopy(build("llama"))
        machine.lost(right)
        assert sizes[: measured.PLAIN_STEPS] == [1] * measured.PLAIN_STEPS
        assert sizes[measured.PLAIN_STEPS] > 1
        del sizes[:]
        machine.lost(right)
        assert max(sizes[: measured.PLAIN_STEPS]) > 1

    def test_plain_steps_that_are_never_timed_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[float] = []
        sent = RoundTimer.mark_sent

        def mark_sent(timer: RoundTimer, size: float) -> None:
            sizes.append(size)
            sent(timer, size)
            warm_ups.count += 1

        monkeypatch.setattr(RoundTimer, "mark_sent", mark_sent)
        machine = Machine(monkeypatch, 0.02, 0.05)
        monkeypatch.setattr(DraftModelDrafter, "relative_cost", lambda *_: 0.1)
        machine.lost(copy.deepcopy(build("llama")))
        assert sizes[: measured.MOST_PLAIN_STEPS] == [1] * measured.MOST_PLAIN_STEPS
        assert sizes[measured.MOST_PLAIN_STEPS] > 1


class Copies(Drafter):
    """Drafts 8-token chains in `share` of the rounds; each token is right with chance `rate`."""

    def __init__(self, rate: float, share: float):
        self.rate, self.share, self.dice = rate, share, random.Random(0)
        self.drafted = 0

    def num_forwards(self, depth: int) -> int:
        return 0

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        self.drafted += 1
        drafts = {row: self._chain(state, row, limit) for row, limit in limits.items()}
        return DraftTree.from_drafts(drafts, state.num_rows)

    def _chain(self, state: GenerationState, row: int, limit: int) -> tuple[list[int], list[int]]:
        tokens = [state.tokens[row][-1]]
        if self.dice.random() < self.share:
            length = len(state.tokens[row])
            right = (self.dice.random() < self.rate for _ in range(min(limit, 8)))
            tokens += [length + i if is_right else 0 for i, is_right in enumerate(right)]
        return tokens, list(range(-1, len(tokens) - 1))


class Load:
    """Rounds of many rows without a model, on a clock driven only by the target.

    A forward pass over n nodes takes `cost(n)` seconds. The target's token at a position is the
    position.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int, cost: Callable[[float], float]):
        self.rows, self.cost, self.now = rows, cost, 0.0
        times = RoundTimes()
        monkeypatch.setattr(measured, "cached_times", lambda *_: times)
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)

    def run(self, copies: Copies, rounds: int) -> tuple[list[float], list[int]]:
        """Return the speed of each round relative to plain steps, and its number of sent nodes."""
        source = DraftSource("copies", copies, 8, {None: (0.8, 0.9)})
        drafter = CostModelDrafter([source], [], build("llama"), "load", Bounds(16, 40))
        ids = torch.tensor([[7, 8, 9]]).expand(self.rows, -1)
        state = GenerationState.create(ids, torch.ones_like(ids), StopRules([], self.rows))
        drafter.start(state)
        speeds, sent = [], []
        for _ in range(rounds):
            tree = drafter.draft(state, dict.fromkeys(range(self.rows), 8))
            seconds = self.cost(tree.num_nodes)
            self.now += seconds
            accepted = [self._follow(tree, row, state.tokens[row]) for row in range(self.rows)]
            bonus = [tokens[-1] for tokens in state.tokens]
            drafter.observe(Verdict(tree, accepted, bonus), ForwardOutput(torch.empty(0)))
            gained = self.rows + sum(map(len, accepted))
            speeds.append(gained * self.cost(self.rows) / self.rows / seconds)
            sent.append(tree.num_nodes - self.rows)
        return speeds, sent

    def _follow(self, tree: DraftTree, row: int, tokens: list[int]) -> list[int]:
        path, node = [], tree.row_start[row]
        while True:
            tokens.append(len(tokens))
            child = tree.child(node, tokens[-1])
            if child is None:
                return path
            path.append(child)
            node = child


def pace(speeds: list[float]) -> float:
    """Return the harmonic mean, the overall speed of rounds with equal gains."""
    return len(speeds) / sum(1 / speed for speed in speeds)


class TestLoads:
    """Under high load every node costs time, so no draft pays off."""

    @pytest.mark.by_default(rows=(16,))
    @pytest.mark.parametrize("rows", [16, 64])
    @pytest.mark.parametrize(
        "cost", [float, lambda n: 4.0 * -(-n // 16)], ids=["compute-bound", "in tiles of 16"]
    )
    def test_drafts_end_within_a_few_rounds_and_cost_nothing_then(
        self, rows: int, cost: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for rate, share in ((0.3, 1.0), (0.7, 0.3)):
            speeds, sent = Load(monkeypatch, rows, cost).run(Copies(rate, share), 200)
            assert sum(size > 0 for size in sent[:50]) <= 6
            assert pace(speeds[50:]) >= 0.98
            assert pace(speeds[:50]) >= 0.9

    def test_drafts_that_pay_at_a_high_load_are_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load = Load(monkeypatch, 64, lambda n: 1 + n / 100)
        speeds, sent = load.run(Copies(0.9, 0.5), 120)
        assert sum(size > 0 for size in sent[50:]) > 60
        assert pace(speeds[50:]) > 1.3

    @pytest.mark.full
    def test_the_cost_of_plain_steps_is_not_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If every round drafts, only larger forward passes are timed."""
        load = Load(monkeypatch, 64, lambda n: 1 + n / 32)
        speeds, _ = load.run(Copies(0.6, 1.0), 300)
        assert pace(speeds[100:]) >= 0.98

    def test_drafts_that_are_never_sent_take_no_time_of_the_host(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load, copies = Load(monkeypatch, 64, float), Copies(0.3, 1.0)
        draft = copies.draft

        def slow(*arguments: Any) -> DraftTree:
            load.now += 6.4
            return draft(*arguments)

        monkeypatch.setattr(copies, "draft", slow)
        load.run(copies, 300)
        # Each draft takes a tenth of a round.
        assert 10 < copies.drafted < 60
        # The next generation backs off sooner.
        before = copies.drafted
        load.run(copies, 20)
        assert copies.drafted - before <= 5

    def test_a_machine_that_gets_faster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slow first steps make unprofitable drafts look profitable."""
        # The slow phase lasts three steps of 16 nodes each.
        load = Load(monkeypatch, 16, lambda n: n * (1.3 if load.now < 60 else 1.0))
        speeds, sent = load.run(Copies(0.6, 1.0), 250)
        assert sent[:3] == [0, 0, 0]
        assert all(sent[3:60])
        assert pace(speeds[150:]) >= 0.98


def test_transformers_own_loop_is_refused_with_the_way_out() -> None:
    drafter = make_drafter(DraftConfig(), build("llama"), draft_model("llama"))
    with pytest.raises(UnsupportedError, match="give a length_policy"):
        drafter.get_candidates(torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize("strategy", ["draft", "falcon"])
def test_the_draft_that_reads_the_prompt_is_not_timed_as_a_draft(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head processes the prompt one round after the target."""
    unread: list[int] = []

    def learn(self: RoundTimes, nodes: float, seconds: float, drafts: Any) -> None:
        unread.extend(tokens for forwards, tokens, _ in drafts.values() if forwards)

    monkeypatch.setattr(measured, "cached_times", lambda *_: RoundTimes())
    monkeypatch.setattr(round_costs, "FORWARD_COST", 0.01)
    monkeypatch.setattr(round_costs, "NODE_COST", 1e-4)
    monkeypatch.setattr(DraftModelDrafter, "relative_cost", lambda *_: None)
    monkeypatch.setattr(RoundTimes, "learn", learn)
    assistant = random_head("llama") if strategy == "falcon" else draft_model("llama")
    prompt = prompts("llama", "one")
    build("llama").generate(
        **prompt, max_new_tokens=16, spec_strategy=strategy, assistant=assistant
    )
    assert len(unread) > 1
    assert unread[0] > prompt["input_ids"].shape[1]
    assert not any(unread[1:])
