"""Drafts captured as one CUDA graph, on the fake GPU: the same drafts in few launches.

A replay uses the inputs of its own round and otherwise the state at capture time. Any host value
baked into a graph therefore shows up in the drafts of later rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    EtaLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_spec import (
    DraftConfig,
    EagleConfig,
    FalconConfig,
    GemmaAssistantConfig,
    GsdConfig,
    MtpConfig,
    TreeConfig,
)
from hf_spec.backend.device import graph_store
from hf_spec.drafting import level_drafter
from hf_spec.drafting.level_drafter import processors_key
from hf_spec.engine.decode import processor_steps
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import RowProcessors
from hf_spec.engine.decode.sampling import distribution
from hf_spec.engine.fast import cuda_graphs, graph_shapes
from hf_spec.engine.fast.cuda_graphs import RUNS_BY_STEP
from hf_spec.engine.forward import kv_pool
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.lossless.distribution import chi_square
from tests import gemma_reference, tiny_models
from tests.device_rounds import (
    Call,
    Case,
    Device,
    decode,
    draft_model,
    eagle_head,
    falcon_head,
    gemma_assistant,
    graphs_of,
    mtp_modules,
)
from tests.fake_gpu import OnGpu

pytestmark = pytest.mark.usefixtures("no_stored_graphs")

DEPTH = 3
TWO: dict[str, Any] = {"max_draft_tokens": 2, "length_policy": "static"}
FIXED: dict[str, Any] = {"max_draft_tokens": DEPTH, "length_policy": "static"}
# Maximum launches and waits of a round, including target and verification.
MOST_LAUNCHES, MOST_WAITS = 10, 2


DRAFT, TREE = DraftConfig(**FIXED), TreeConfig(**FIXED, max_nodes=12)
EAGLE = EagleConfig(**FIXED, width=3, max_nodes=10)
GEMMA = GemmaAssistantConfig(**FIXED, tree="dynamic", width=3, max_nodes=10)
FALCON = FalconConfig(tree=tiny_models.wide_tree(), length_policy="static")
SOME_ENDS = tuple(range(0, tiny_models.VOCAB, 5))
# Untrained heads are never right, so these need more tokens for replays in the first call.
eagle = partial(Case, assistant=eagle_head, new_tokens=12)
gemma = partial(Case, assistant=gemma_assistant, new_tokens=12)
CASES = {
    "draft": Case(DRAFT, draft_model),
    "tree": Case(TREE, draft_model),
    "eagle": eagle(EAGLE),
    "falcon": Case(FALCON, falcon_head),
    "gemma": gemma(GEMMA),
    "draft, rows": Case(DRAFT, draft_model, num_rows=3),
    "tree, rows, ends": Case(TREE, draft_model, num_rows=3, ends=SOME_ENDS),
    "tree, whole": Case(
        TreeConfig(**FIXED, children=2, expanded_per_level=32, max_nodes=12), draft_model
    ),
    "tree, pruned": Case(
        TreeConfig(**FIXED, max_nodes=8, min_probability=0.1, min_sibling_ratio=0.3),
        draft_model,
        num_rows=2,
    ),
    "gsd": Case(
        GsdConfig(merge_length=None, expanded_per_level=6, **FIXED, max_nodes=12), draft_model
    ),
    "eagle, chain, rows": eagle(EagleConfig(**FIXED, tree="chain"), num_rows=3),
    "eagle, rows": eagle(EAGLE, num_rows=3),
    "falcon, rows": Case(FALCON, falcon_head, num_rows=3),
    "gemma, chain, rows": gemma(GemmaAssistantConfig(**FIXED), num_rows=3),
    "gemma, windows, rows, ends": gemma(
        GEMMA,
        assistant=partial(gemma_reference.random_assistant, "gemma3"),
        model="gemma3",
        num_rows=3,
        ends=SOME_ENDS,
    ),
    "gemma, processors": gemma(GEMMA, processors=[TemperatureLogitsWarper(0.5)]),
    "mtp": Case(MtpConfig(**FIXED), mtp_modules, num_rows=2),
    "draft, processors": Case(
        DRAFT, draft_model, processors=[TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    ),
}
# Cases whose target passes all have one size -> depth of their drafts.
FEW_LAUNCHES = {"draft": DEPTH, "tree": DEPTH, "eagle": DEPTH, "falcon": 4, "gemma": DEPTH}


def on_host(case: Case) -> Call:
    """Return the call with drafts that grow on the host, level by level."""
    model = tiny_models.build(case.model)
    return decode(case, model, case.drafter(model, case.assistant()))


def check_same(call: Call, plain: Call) -> None:
    assert call.tokens == plain.tokens
    assert call.drafts == plain.drafts


@pytest.mark.by_default(name=("eagle", "gemma, windows, rows, ends"))
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_that_grow_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    plain = on_host(case)
    with Device(case, monkeypatch) as device:
        first, again = device.decode(), device.decode()
    check_same(first, plain)
    check_same(again, plain)
    assert again.programs >= first.programs > 0
    # The drafts are not all the same.
    assert len({tuple(tokens) for tokens, _ in plain.drafts}) > 2
    if name not in FEW_LAUNCHES:
        return
    assert again.captures == 0
    assert max(one.waits for one in again.rounds) <= MOST_WAITS
    # Skip the first rounds after the prompt, and drafts cut short at the end.
    whole = [one for one in again.rounds[2:] if one.limit >= FEW_LAUNCHES[name]]
    assert len(whole) > 2
    assert max(one.launches for one in whole) <= MOST_LAUNCHES
    assert not any(one.settles for one in whole)


@pytest.mark.full
@pytest.mark.parametrize("config", [DraftConfig(), TreeConfig()], ids=["draft", "tree"])
def test_the_default_policy_does_not_wait(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft depth depends only on earlier rounds."""
    case = Case(config, draft_model, level_cost=0.2)
    with Device(case, monkeypatch) as device:
        calls = [device.decode(), device.decode()]
    assert calls[0].tokens == on_host(CASES["draft"]).tokens
    drafted = [one for one in calls[1].rounds if one.tree.num_nodes > 1]
    assert len({max(one.tree.depth) for one in drafted}) > 1
    assert max(one.waits for one in drafted) <= MOST_WAITS
    replayed = [one.launches for one in drafted[1:] if not one.settles]
    assert len(replayed) > 3
    assert min(replayed) <= MOST_LAUNCHES


@pytest.mark.by_default(config=(TREE,))
@pytest.mark.parametrize(
    ("config", "assistant"),
    [(TREE, draft_model), (GEMMA, gemma_assistant)],
    ids=["TreeConfig", "GemmaAssistantConfig"],
)
def test_rows_leave_a_draft_at_their_own_depths(
    config: Any, assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that leave are an input of the graph; their number is part of the graph."""
    limits = [{0: 3, 1: 1, 2: 2}, {0: 1, 1: 2, 2: 3}, {0: 2, 1: 3, 2: 1}] * 2
    case = Case(config, assistant, num_rows=3)

    @torch.no_grad()
    def drafts(model: Any, assistant: Any, there: Any) -> tuple[list[Any], int]:
        state, drafter = case.begin(there), case.drafter(model, assistant)
        target = ModelRunner(model, case.num_rows, drafter.hidden_layers)
        found = []
        with target.active(), drafter.active(state):
            run_prompt(target, drafter, state)
            for some in limits:
                tree = drafter.draft(state, some)
                found.append((tree.tokens, tree.parent))
                back_to_the_root(drafter, state)
            graphs = graphs_of(drafter)
            assert graphs is not None
            programs = sum(bucket.program is not None for bucket in graphs._recorded)
        return found, programs

    plain, _ = drafts(tiny_models.build("llama"), case.assistant(), lambda tensor: tensor)
    with Device(case, monkeypatch) as device:
        captured, programs = drafts(device.model, device.assistant, OnGpu)
    assert programs == 1
    assert captured == plain


def run_prompt(target: ModelRunner, drafter: Any, state: GenerationState, token: int = 7) -> None:
    """Run the prompts on the target and continue all rows with the same token."""
    roots = {row: ([state.tokens[row][-1]], [-1]) for row in state.unfinished}
    tree = DraftTree.from_drafts(roots, state.num_rows)
    output = target.forward(tree, state.tokens)
    verdict = Verdict(tree, [[] for _ in roots], [token for _ in roots])
    state.commit(verdict)
    target.keep(verdict.paths)
    drafter.observe(verdict, output)


def back_to_the_root(drafter: Any, state: GenerationState) -> None:
    """Undo a round; a Gemma assistant has no state to undo."""
    if isinstance(drafter._runner, ModelRunner):
        drafter._runner.keep([[]] * state.num_rows)
        for row in range(state.num_rows):
            drafter._runner.shorten(row, len(state.tokens[row]) - 1)


@pytest.mark.full
class TestDraws:
    """Tokens sampled in a graph; each of the many equal rows is one sample."""

    ROWS, ROUNDS, CHOICES = 48, 34, 4
    # Warm-up rounds.
    WARM = RUNS_BY_STEP + 3

    # All rows continue with this token. The draft model's most likely tokens then overlap at both
    # levels, so reusing the same random numbers for both is detected.
    ROOT = 5

    @torch.no_grad()
    def p_value(
        self, monkeypatch: pytest.MonkeyPatch, kind: str = "draft", rounds: int = ROUNDS
    ) -> float:
        """Return the p-value of the joint counts of the first two tokens over all replays."""
        processors = [TopKLogitsWarper(self.CHOICES)]
        config, assistant, logits = self.KINDS[kind]
        options: dict[str, Any] = {"processors": processors, "sampled": True}
        case = Case(config, assistant, num_rows=self.ROWS, **options)
        text = [*tiny_models.settled_prompt("llama")[0].tolist(), self.ROOT]
        monkeypatch.setattr(tiny_models, "left_padded", self.equal_rows)
        counts: dict[tuple[int, int], int] = {}
        torch.manual_seed(0)
        with Device(case, monkeypatch) as device:
            state, drafter = case.begin(OnGpu), device.drafter()
            target = ModelRunner(device.model, self.ROWS, drafter.hidden_layers)
            with target.active(), drafter.active(state):
                run_prompt(target, drafter, state, self.ROOT)
                for number in range(rounds + self.WARM):
                    tree = drafter.draft(state, dict.fromkeys(range(self.ROWS), 2))
                    back_to_the_root(drafter, state)
                    if number >= self.WARM:
                        for row in range(self.ROWS):
                            _, first, second = (tree.tokens[node] for node in tree.nodes(row))
                            counts[first, second] = counts.get((first, second), 0) + 1
                assert tree.draft_probs is not None
                lines = tree.draft_probs.cpu()
            graphs = graphs_of(drafter)
            assert graphs is not None
            assert graphs.replays >= rounds
        expected: dict[tuple[int, int], float] = {}

        def probs(*path: int) -> Tensor:
            scores = logits(text, path)[None].float()
            return distribution(processors[0](torch.tensor([[*text, *path]]), scores))[0]

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

    @staticmethod
    def model_logits(text: list[int], path: Sequence[int]) -> Tensor:
        logits: Tensor = draft_model()(torch.tensor([[*text, *path]])).logits[0, -1]
        return logits

    @staticmethod
    def assistant_logits(text: list[int], path: Sequence[int]) -> Tensor:
        target = tiny_models.build("llama")
        return gemma_reference.reference(gemma_reference.published(target), target, text, path)

    # Config, assistant, and the logits of the assistant after a text and a drafted path.
    KINDS: ClassVar[dict[str, tuple[Any, Any, Any]]] = {
        "draft": (DraftConfig(**TWO), draft_model, model_logits),
        "gemma": (GemmaAssistantConfig(**TWO), gemma_assistant, assistant_logits),
    }

    @pytest.mark.parametrize("kind", KINDS)
    def test_they_have_the_distribution_of_the_draft_model(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.p_value(monkeypatch, kind) > 1e-4

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
    """Keys that decide which drafts share a graph."""

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
        # A graph would keep the addresses of their tensors in this call.
        assert key(SuppressTokensLogitsProcessor([3], "cpu")) is None
        assert key(EtaLogitsWarper(0.1)) is None
        assert key(RowProcessors(2, lambda row, error: None)) is None
        # A user's processor is not applied to drafts.
        assert key(lambda ids, scores: scores) == ()

    @pytest.mark.full
    def test_other_processors_in_the_next_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Case(DRAFT, draft_model, processors=[TopKLogitsWarper(20)], sampled=True)
        few = Case(DRAFT, draft_model, processors=[TopKLogitsWarper(2)], sampled=True)
        with Device(case, monkeypatch) as device:
            device.decode()
            call = device.decode(few)
            for one in call.rounds[1:]:
                if one.tree.draft_probs is not None:
                    assert int((one.tree.draft_probs > 0).sum(dim=1).cpu().max()) <= 2

    def test_settings_of_processors_outlive_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A real graph keeps the addresses that it reads, not the tensors."""
        read = []
        processors = [TemperatureLogitsWarper(0.6), TopKLogitsWarper(17)]
        case = Case(DRAFT, draft_model, processors=processors, sampled=True)
        with Device(case, monkeypatch) as device:
            apply = processor_steps.filter_scores

            def seen(scores: Tensor, settings: Any) -> Tensor:
                read.append(StorageWeakRef(settings.held.untyped_storage()))
                return apply(scores, settings)

            with monkeypatch.context() as patch:
                patch.setattr(processor_steps, "filter_scores", seen)
                assert device.decode().programs > 0
            for stored in graph_store._stored.values():
                for shape in stored.recorded.values():
                    # The fake graph holds the call.
                    shape.graph = None
            gc.collect()
        assert read
        assert not any(settings.expired() for settings in read)


@pytest.mark.full
class TestFallback:
    """Drafts that are not captured grow pass by pass and are identical."""

    def test_a_draft_that_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The wait is detected before the capture; the single steps are still captured."""
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

    @pytest.mark.parametrize("name", ["tree", "gemma"])
    def test_without_memory(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Graphs are freed, and the draft is repeated without them."""
        plain, failures = on_host(CASES[name]), []
        with Device(CASES[name], monkeypatch) as device:
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

    @pytest.mark.parametrize("name", ["tree", "gemma"])
    def test_a_storage_that_grows(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Graphs at the old addresses are dropped."""
        monkeypatch.setattr(kv_pool, "MAX_RESERVED", 16)
        monkeypatch.setattr(cuda_graphs, "MAX_RESERVED", 16)
        plain = on_host(CASES[name])
        with Device(CASES[name], monkeypatch) as device:
            call = device.decode()
        check_same(call, plain)

    def test_a_drafter_on_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its passes are captured, but not together with work on the target's device."""
        case = CASES["gemma"]
        plain = on_host(case)
        with Device(case, monkeypatch) as device:
            other = property(lambda self: torch.device("cuda", 1))
            monkeypatch.setattr(cuda_graphs.StepGraphs, "device", other)
            call = device.decode()
        check_same(call, plain)
        assert call.programs == 0
        assert call.captures > 1

    @pytest.mark.parametrize("name", ["eagle", "gemma"])
    def test_a_call_that_ends_early(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error inside a draft leaves no running program behind."""

        def failing(self: Any, *rest: Any) -> list[Tensor]:
            raise ZeroDivisionError

        case = CASES[name]
        plain = on_host(case)
        with Device(case, monkeypatch) as device:
            with monkeypatch.context() as patch:
                patch.setattr(cuda_graphs._RunningProgram, "run", failing)
                with pytest.raises(ZeroDivisionError):
                    device.decode()
            assert cuda_graphs._thread.program is None
            check_same(device.decode(), plain)
