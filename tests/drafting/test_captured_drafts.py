"""Drafts whose passes are one CUDA graph, on the pretended GPU: the same drafts, in few launches.

A replay computes on the inputs of its own round, with all else as it was during the capture: what a
graph took from the host at that time shows in the drafts of later rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    EtaLogitsWarper,
    MaxLengthCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_spec import DraftConfig, EagleConfig, FalconConfig, GsdConfig, MtpConfig, TreeConfig
from hf_spec.adapters.published import read_published
from hf_spec.backend.device import graph_store
from hf_spec.backend.device.capture import warm_ups
from hf_spec.drafting import level_drafter
from hf_spec.drafting.cost_model.cost_curves import Costs
from hf_spec.drafting.level_drafter import processors_key
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import RowProcessors
from hf_spec.engine.decode.loop import finish_step
from hf_spec.engine.decode.sampling import distribution
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.fast import cuda_graphs, graph_shapes
from hf_spec.engine.fast.cuda_graphs import RUNS_BY_STEP, StepGraphs
from hf_spec.engine.forward import kv_pool
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.lossless.distribution import chi_square
from hf_spec.methods.eagle.head import build as build_eagle
from hf_spec.methods.registry import make_drafter
from tests import mtp_reference, tiny_models
from tests.fake_gpu import FakeGpu, OnGpu, on_gpu, pretended, recording
from tests.falcon_reference import random_head
from tests.published_heads import sample

DEPTH = 3
FIXED: dict[str, Any] = {"max_draft_tokens": DEPTH, "length_policy": "static"}
# Launches and waits of a round, target and verification included.
MOST_LAUNCHES, MOST_WAITS = 10, 2


def draft_model() -> Any:
    return tiny_models.draft_model("llama")


def falcon_head() -> Any:
    return random_head("llama")


def eagle_head() -> Any:
    found = read_published(sample("eagle3").folder)
    assert found is not None
    return build_eagle(found, tiny_models.build("llama"))


def mtp_modules() -> Any:
    return mtp_reference.sample("llama", "index").head


@dataclass
class Case:
    """A way to decode: strategy, what drafts, rows, tokens that end a row, and processors."""

    config: Any
    assistant: Callable[[], Any] = draft_model
    num_rows: int = 1
    ends: tuple[int, ...] = ()
    processors: list[Any] = field(default_factory=list)
    sampled: bool = False

    @property
    def new_tokens(self) -> int:
        """Enough for some replays in the first call; an untrained head is never right."""
        return 12 if self.assistant is eagle_head else 24


DRAFT, TREE = DraftConfig(**FIXED), TreeConfig(**FIXED, max_nodes=12)
EAGLE = EagleConfig(**FIXED, width=3, max_nodes=10)
FALCON = FalconConfig(tree=tiny_models.wide_tree(), length_policy="static")
SOME_ENDS = tuple(range(0, tiny_models.VOCAB, 5))
CASES = {
    "draft": Case(DRAFT),
    "tree": Case(TREE),
    "eagle": Case(EAGLE, eagle_head),
    "falcon": Case(FALCON, falcon_head),
    "draft, rows": Case(DRAFT, num_rows=3),
    "tree, rows, ends": Case(TREE, num_rows=3, ends=SOME_ENDS),
    "tree, whole": Case(TreeConfig(**FIXED, children=2, expanded_per_level=32, max_nodes=12)),
    "tree, pruned": Case(
        TreeConfig(**FIXED, max_nodes=8, min_probability=0.1, min_sibling_ratio=0.3), num_rows=2
    ),
    "gsd": Case(GsdConfig(merge_length=None, expanded_per_level=6, **FIXED, max_nodes=12)),
    "eagle, chain, rows": Case(EagleConfig(**FIXED, tree="chain"), eagle_head, num_rows=3),
    "eagle, rows": Case(EAGLE, eagle_head, num_rows=3),
    "falcon, rows": Case(FALCON, falcon_head, num_rows=3),
    "mtp": Case(MtpConfig(**FIXED), mtp_modules, num_rows=2),
    "draft, processors": Case(
        DRAFT, processors=[TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    ),
}
# Cases with targets of one size -> the depth of their drafts.
FEW_LAUNCHES = {"draft": DEPTH, "tree": DEPTH, "eagle": DEPTH, "falcon": 4}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    graph_store.forget()
    yield
    graph_store.forget()


@dataclass
class Round:
    """A draft, its longest possible depth, what its round cost, and whether graphs were made."""

    tree: DraftTree
    limit: int
    launches: int
    waits: int
    settles: bool


@dataclass
class Call:
    """The tokens and rounds of a call, its captures, and its graphs of whole drafts."""

    tokens: list[list[int]]
    rounds: list[Round]
    captures: int
    programs: int

    @property
    def drafts(self) -> list[tuple[list[int], list[int]]]:
        return [(one.tree.tokens, one.tree.parent) for one in self.rounds]


def begin(case: Case, there: Callable[[Tensor], Tensor]) -> GenerationState:
    settled = tiny_models.settled_prompt("llama")[0]
    rows = [settled[: len(settled) - 3 * row] for row in range(case.num_rows)]
    ids, mask = (there(tensor) for tensor in tiny_models.left_padded(rows).values())
    length = ids.shape[1] + case.new_tokens
    rules: list[Any] = [MaxLengthCriteria(length)]
    rules += [EosTokenCriteria(list(case.ends))] if case.ends else []
    options: dict[str, Any] = {"processors": case.processors, "do_sample": case.sampled}
    stop = StopRules(rules, case.num_rows)
    return GenerationState.create(ids, mask, stop, expected_length=length, **options)


def graphs_of(drafter: Any) -> StepGraphs:
    drafter = getattr(drafter, "_main", None).drafter if hasattr(drafter, "_main") else drafter
    found: StepGraphs = drafter._runner._graphs
    return found


@torch.no_grad()
def decode(case: Case, model: Any, drafter: Drafter, gpu: FakeGpu | None = None) -> Call:
    torch.manual_seed(0)
    state = begin(case, OnGpu if gpu else lambda tensor: tensor)
    target = ModelRunner(model, case.num_rows, drafter.hidden_layers)
    target.expected_length = state.expected_length
    rounds, log = [], gpu or FakeGpu()
    with target.active(), drafter.active(state):
        verifier = drafter.make_verifier(case.processors, case.num_rows)
        while state.unfinished:
            log.restart()
            before = warm_ups.count
            limits = state.draft_limits
            tree = drafter.draft(state, limits)
            output = target.forward(tree, state.tokens)
            finish_step(target, drafter, verifier, state, tree, output)
            waits = sum(log.waits.values()) + log.fetches
            rounds.append(
                Round(tree, min(limits.values()), log.launches, waits, warm_ups.count > before)
            )
        graphs = graphs_of(drafter)
        programs = sum(bucket.program is not None for bucket in graphs._recorded)
        captures = target.graph_counts[1] + graphs.captures
    return Call(state.tokens, rounds, captures, programs)


def on_host(case: Case) -> Call:
    """Drafts that grow on the host, level by level."""
    model = tiny_models.build("llama")
    return decode(case, model, make_drafter(case.config, model, case.assistant()))


def check_same(call: Call, plain: Call) -> None:
    assert call.tokens == plain.tokens
    assert call.drafts == plain.drafts


class Device:
    """The pretended GPU, with the model and the assistant of a case on it."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch):
        self.case = case
        assistant = case.assistant()
        tiny_models.settled_prompt("llama")
        self._stack = ExitStack()
        self.gpu = self._stack.enter_context(pretended(monkeypatch))
        self._stack.enter_context(recording(monkeypatch, self.gpu))
        self.model, self.assistant = on_gpu(tiny_models.build("llama")), on_gpu(assistant)
        if case.assistant is mtp_modules:
            # The target's embedding is no module of the head.
            self.assistant._shared = [self.model.get_input_embeddings()]

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def drafter(self) -> Drafter:
        return make_drafter(self.case.config, self.model, self.assistant)

    def decode(self, case: Case | None = None) -> Call:
        return decode(case or self.case, self.model, self.drafter(), self.gpu)


@pytest.mark.by_default(name=("eagle",))
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_that_grow_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    plain = on_host(case)
    with Device(case, monkeypatch) as device:
        first, again = device.decode(), device.decode()
    check_same(first, plain)
    check_same(again, plain)
    assert again.programs >= first.programs > 0
    # Some draft was not the first one again.
    assert len({tuple(tokens) for tokens, _ in plain.drafts}) > 2
    if name not in FEW_LAUNCHES:
        return
    assert again.captures == 0
    assert max(one.waits for one in again.rounds) <= MOST_WAITS
    # But the first, after the prompt, and those that are cut at the end.
    whole = [one for one in again.rounds[2:] if one.limit >= FEW_LAUNCHES[name]]
    assert len(whole) > 2
    assert max(one.launches for one in whole) <= MOST_LAUNCHES
    assert not any(one.settles for one in whole)


@pytest.mark.full
@pytest.mark.parametrize("config", [DraftConfig(), TreeConfig()], ids=["draft", "tree"])
def test_the_default_policy_does_not_wait(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The depth of a draft follows from the rounds before it."""
    costs = Costs(lambda nodes: 1.0 + 0.02 * nodes, {config.strategy: lambda depth: 0.2 * depth})
    case = Case(config)
    calls = []
    with Device(case, monkeypatch) as device:
        for _ in range(2):
            drafter: Any = device.drafter()
            drafter._configured_costs = costs
            calls.append(decode(case, device.model, drafter, device.gpu))
    assert calls[0].tokens == on_host(Case(DRAFT)).tokens
    drafted = [one for one in calls[1].rounds if one.tree.num_nodes > 1]
    assert len({max(one.tree.depth) for one in drafted}) > 1
    assert max(one.waits for one in drafted) <= MOST_WAITS
    replayed = [one.launches for one in drafted[1:] if not one.settles]
    assert len(replayed) > 3
    assert min(replayed) <= MOST_LAUNCHES


def test_rows_leave_a_draft_at_their_own_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them leave is an input of the graph, how many is part of it."""
    limits = [{0: 3, 1: 1, 2: 2}, {0: 1, 1: 2, 2: 3}, {0: 2, 1: 3, 2: 1}] * 2
    case = Case(TREE, num_rows=3)

    @torch.no_grad()
    def drafts(model: Any, assistant: Any, there: Any) -> tuple[list[Any], int]:
        state = begin(case, there)
        drafter: Any = make_drafter(case.config, model, assistant)
        found = []
        with drafter.active(state):
            for some in limits:
                tree = drafter.draft(state, some)
                found.append((tree.tokens, tree.parent))
                back_to_the_root(drafter, state)
            buckets = graphs_of(drafter)._recorded
        return found, sum(bucket.program is not None for bucket in buckets)

    plain, _ = drafts(tiny_models.build("llama"), case.assistant(), lambda tensor: tensor)
    with Device(case, monkeypatch) as device:
        captured, programs = drafts(device.model, device.assistant, OnGpu)
    assert programs == 1
    assert captured == plain


def back_to_the_root(drafter: Any, state: GenerationState) -> None:
    """End a round as if it had not been."""
    drafter._runner.keep([[]] * state.num_rows)
    for row in range(state.num_rows):
        drafter._runner.shorten(row, len(state.tokens[row]) - 1)


@pytest.mark.full
class TestDraws:
    """Tokens that are drawn in a graph; many equal rows are many draws."""

    ROWS, ROUNDS, CHOICES = 48, 34, 4
    # Rounds that warm up.
    WARM = RUNS_BY_STEP + 3

    @torch.no_grad()
    def p_value(self, monkeypatch: pytest.MonkeyPatch, rounds: int = ROUNDS) -> float:
        """How likely the joint counts of the first two tokens are, of all replays."""
        processors = [TopKLogitsWarper(self.CHOICES)]
        config = DraftConfig(max_draft_tokens=2, length_policy="static")
        case = Case(config, num_rows=self.ROWS, processors=processors, sampled=True)
        model, prompt = draft_model(), tiny_models.settled_prompt("llama")
        monkeypatch.setattr(tiny_models, "left_padded", self.equal_rows)
        counts: dict[tuple[int, int], int] = {}
        torch.manual_seed(0)
        with Device(case, monkeypatch) as device:
            state, drafter = begin(case, OnGpu), device.drafter()
            with drafter.active(state):
                for number in range(rounds + self.WARM):
                    tree = drafter.draft(state, dict.fromkeys(range(self.ROWS), 2))
                    back_to_the_root(drafter, state)
                    if number >= self.WARM:
                        for row in range(self.ROWS):
                            _, first, second = (tree.tokens[node] for node in tree.nodes(row))
                            counts[first, second] = counts.get((first, second), 0) + 1
                assert tree.draft_probs is not None
                lines = tree.draft_probs.cpu()
            assert graphs_of(drafter).replays >= rounds
        expected: dict[tuple[int, int], float] = {}

        def probs(*path: int) -> Tensor:
            ids = torch.cat([prompt[0], torch.tensor(path, dtype=torch.long)])[None]
            return distribution(processors[0](ids, model(ids).logits[:, -1].float()))[0]

        torch.testing.assert_close(lines[0], probs(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lines[1], probs(tree.tokens[1]), atol=1e-5, rtol=1e-4)
        for first in probs().nonzero()[:, 0].tolist():
            after = probs(first)
            for second in after.nonzero()[:, 0].tolist():
                expected[first, second] = float(probs()[first] * after[second])
        assert set(counts) <= set(expected)
        total = self.ROWS * rounds
        cells = ((total * chance, counts.get(key, 0)) for key, chance in expected.items())
        return chi_square(cells).p_value

    @staticmethod
    def equal_rows(rows: list[Tensor]) -> dict[str, Tensor]:
        ids = rows[0].expand(len(rows), -1).clone()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def test_they_have_the_distribution_of_the_draft_model(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.p_value(monkeypatch) > 1e-4

    def test_numbers_that_are_drawn_once_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill = graph_shapes.Shape.fill

        def stale(self: Any, inputs: Any) -> None:
            noise = None if self.noise is None or self.uses < 2 else self.noise.clone()
            fill(self, inputs)
            if noise is not None:
                self.noise.copy_(noise)

        monkeypatch.setattr(graph_shapes.Shape, "fill", stale)
        assert self.p_value(monkeypatch) < 1e-9

    def test_equal_numbers_for_all_levels_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill = graph_shapes.Shape.fill

        def repeated(self: Any, inputs: Any) -> None:
            fill(self, inputs)
            if self.noise is not None:
                half = len(self.noise) // 2
                self.noise[half:] = self.noise[:half]

        monkeypatch.setattr(graph_shapes.Shape, "fill", repeated)
        assert self.p_value(monkeypatch) < 1e-9


class TestKeys:
    """Which drafts share a graph."""

    def test_processors(self) -> None:
        def key(*processors: Any) -> Any:
            return processors_key(processors)

        assert key() == ()
        assert key(TopKLogitsWarper(3)) == key(TopKLogitsWarper(3))
        assert key(TopKLogitsWarper(3)) != key(TopKLogitsWarper(4))
        assert key(TopKLogitsWarper(3), TopPLogitsWarper(0.5)) != key(
            TopPLogitsWarper(0.5), TopKLogitsWarper(3)
        )
        assert key(TopKLogitsWarper(3)) != key(TemperatureLogitsWarper(3.0))
        # Graphs would read their tensors where they are in this call.
        assert key(SuppressTokensLogitsProcessor([3], "cpu")) is None
        assert key(EtaLogitsWarper(0.1)) is None
        assert key(RowProcessors(2, lambda row, error: None)) is None
        # A user's is not applied to drafts.
        assert key(lambda ids, scores: scores) == ()

    @pytest.mark.full
    def test_other_processors_in_the_next_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Case(DRAFT, processors=[TopKLogitsWarper(20)], sampled=True)
        few = Case(DRAFT, processors=[TopKLogitsWarper(2)], sampled=True)
        with Device(case, monkeypatch) as device:
            device.decode()
            call = device.decode(few)
            for one in call.rounds[1:]:
                if one.tree.draft_probs is not None:
                    assert int((one.tree.draft_probs > 0).sum(dim=1).cpu().max()) <= 2


@pytest.mark.full
class TestFallback:
    """Drafts that are not captured grow pass by pass, and are the same."""

    def test_a_draft_that_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is found before the capture, once; its steps are captured all the same."""
        reads = []

        def waiting(scores: Tensor) -> Tensor:
            if isinstance(scores, OnGpu) and cuda_graphs._thread.program is not None:
                reads.append(float(scores.max()))
            return distribution(scores)

        case = CASES["draft, processors"]
        plain = on_host(case)
        monkeypatch.setattr(level_drafter, "distribution", waiting)
        with Device(case, monkeypatch) as device:
            first, again = device.decode(), device.decode()
        check_same(first, plain)
        check_same(again, plain)
        assert (first.programs, again.programs, reads) == (0, 0, [])
        assert first.captures > 1

    def test_a_capture_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, tries = on_host(CASES["tree"]), []
        with Device(CASES["tree"], monkeypatch) as device:
            record = graph_shapes.Shape.record

            def failing(self: Any, *rest: Any) -> None:
                if self.key is not None:
                    tries.append(self.key)
                    raise RuntimeError("no")
                record(self, *rest)

            monkeypatch.setattr(graph_shapes.Shape, "record", failing)
            first, again = device.decode(), device.decode()
        check_same(first, plain)
        check_same(again, plain)
        assert first.programs == again.programs == 0
        assert again.captures == 0
        assert len(tries) == len(set(tries)) > 0

    def test_without_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Graphs are freed, and the draft runs again without any."""
        plain, failures = on_host(CASES["tree"]), []
        with Device(CASES["tree"], monkeypatch) as device:
            run = cuda_graphs._RunningProgram.run

            def failing(self: Any, *rest: Any) -> list[Tensor]:
                if len(failures) == 3:
                    failures.append("out of memory")
                    raise torch.OutOfMemoryError("no room")
                failures.append("ran")
                return run(self, *rest)

            monkeypatch.setattr(cuda_graphs._RunningProgram, "run", failing)
            check_same(device.decode(), plain)
            assert cuda_graphs._thread.program is None
            check_same(device.decode(), plain)
        assert "out of memory" in failures

    def test_a_storage_that_grows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Graphs at the old addresses are dropped."""
        monkeypatch.setattr(kv_pool, "MAX_RESERVED", 16)
        monkeypatch.setattr(cuda_graphs, "MAX_RESERVED", 16)
        plain = on_host(CASES["tree"])
        with Device(CASES["tree"], monkeypatch) as device:
            call = device.decode()
        check_same(call, plain)

    def test_a_call_that_ends_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error inside a draft leaves nothing behind."""

        def failing(self: Any, *rest: Any) -> list[Tensor]:
            raise ZeroDivisionError

        case = CASES["eagle"]
        plain = on_host(case)
        with Device(case, monkeypatch) as device:
            with monkeypatch.context() as patch:
                patch.setattr(cuda_graphs._RunningProgram, "run", failing)
                with pytest.raises(ZeroDivisionError):
                    device.decode()
            assert cuda_graphs._thread.program is None
            check_same(device.decode(), plain)
