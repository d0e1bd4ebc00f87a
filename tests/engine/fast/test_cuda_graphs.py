"""Steps padded for CUDA graphs: the same tokens, few shapes, and recorded steps.

Without a GPU nothing can be recorded, but everything that recording needs also runs on a CPU.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_spec_kernels import using
from torch import Tensor

import hf_spec
from hf_spec.backend.device import graph_store
from hf_spec.backend.device.capture import (
    NoWaits,
    WaitError,
    cuda_graphs,
    padded_steps,
    set_cuda_graphs,
)
from hf_spec.backend.device.graph_store import StoredGraphs
from hf_spec.common.logging import log_once
from hf_spec.engine.fast import cuda_graphs as step_graphs
from hf_spec.engine.fast.cuda_graphs import ReadingGraphs, StepGraphs, obstacle
from hf_spec.engine.forward import kv_pool as kv_cache
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.truncated import truncated_draft
from hf_spec.methods.feature_pairs.draft_head import DraftHead
from tests import hybrid_models, tiny_models
from tests.compiler import needs_compiler
from tests.fake_gpu import standing
from tests.tiers import FEW_STRATEGIES

CPU = torch.device("cpu")
# Steps with the adaptive tokens of `sdsat` are not padded.
STRATEGIES = [name for name in tiny_models.STRATEGIES if name not in {"none", "sdsat"}]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record every shape that steps are padded to, in the order of first use."""
    found: list[Any] = []
    create = step_graphs.Shape.__init__

    def remember(self: Any, bucket: Any, inputs: Any, *rest: Any) -> None:
        found.append((type(self), inputs.steps[0].slot_mapping.shape[1]))
        create(self, bucket, inputs, *rest)

    monkeypatch.setattr(step_graphs.Shape, "__init__", remember)
    return found


@pytest.fixture(autouse=True)
def nothing_known(no_stored_graphs: None) -> None:
    log_once.cache_clear()


def generate(name: str, kind: str, **options: Any) -> Any:
    return tiny_models.build(name).generate(
        **tiny_models.prompts(name, kind),
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padded_steps_say_the_same(strategy: str, kind: str, shapes: list[Any]) -> None:
    options = tiny_models.speculation("llama", strategy)
    eager = generate("llama", kind, **options)
    assert not shapes, "only a GPU pads by itself"
    with padded_steps():
        padded = generate("llama", kind, **options)
    assert shapes
    assert torch.equal(padded.sequences, eager.sequences)
    assert padded.spec_stats.target_tokens == eager.spec_stats.target_tokens
    assert padded.spec_stats.accepted_tokens == eager.spec_stats.accepted_tokens


# Windows in some layers, a softcap, sinks and experts, learned positions.
@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss", "opt"])
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
def test_padded_steps_of_other_models(name: str, strategy: str, shapes: list[Any]) -> None:
    options = tiny_models.speculation(name, strategy)
    with padded_steps():
        padded = generate(name, "ragged", **options)
    assert shapes
    plain = generate(name, "ragged")
    assert torch.equal(padded.sequences, plain.sequences)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record as on a GPU: a replay computes from the static inputs into the static outputs.

    This exposes outputs that the next step overwrites. Return the replay counts of the runners.
    """
    replays: list[int] = []

    def record(self: Any, compute: Any, pool: Any, memory: Any) -> None:
        bound = standing(pool)
        self.outputs = [torch.full_like(t, torch.nan) for t in compute(self, pool)]

        def replay() -> None:
            outputs = compute(self, bound)
            for mine, new in zip(self.outputs, outputs, strict=True):
                mine.copy_(new)

        self.graph = SimpleNamespace(replay=replay)

    close = StepGraphs.close
    monkeypatch.setattr(step_graphs, "DEVICES", {"cpu"})
    monkeypatch.setattr(step_graphs, "serves", lambda _: True)
    # The reference implementations run instead of the kernels, and read values.
    monkeypatch.setattr(step_graphs, "NoWaits", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(step_graphs.Shape, "record", record)
    monkeypatch.setattr(
        StepGraphs, "close", lambda self: (replays.append(self.replays), close(self))
    )
    return replays


@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("strategy", ["lookup", "draft", "tree", "falcon"])
def test_replayed_steps_say_the_same(strategy: str, kind: str, recorded: list[int]) -> None:
    options = tiny_models.speculation("llama", strategy)
    if strategy == "falcon":
        # Small enough that the target's steps are recorded too.
        options["spec_strategy"] = hf_spec.FalconConfig(tree="chain")
    replayed = generate("llama", kind, **options)
    stats = replayed.spec_stats
    assert sum(recorded) > 0
    assert len(recorded) == (1 if strategy == "lookup" else 2), "draft model or head, target"
    assert stats.graph_replays == recorded[-1]
    assert (stats.graph_captures > 0) == (stats.graph_replays > 0)
    assert stats.graph_refusal is None
    assert torch.equal(replayed.sequences, generate("llama", kind).sequences)


def few_tokens_draft() -> Any:
    """Return a draft model that predicts only four tokens."""
    draft = truncated_draft(tiny_models.build("llama"), 1)
    head = DraftHead(draft.get_output_embeddings(), torch.tensor([3, 5, 8, 9]))
    draft.set_output_embeddings(head)
    return draft


def forward(runner: ModelRunner, sequence: list[int], nodes: int) -> Tensor:
    tree = DraftTree.from_rows([([sequence[-1], *range(5, 4 + nodes)], range(-1, nodes - 1))])
    with torch.no_grad():
        logits = runner.forward(tree, [sequence]).logits.clone()
    runner.keep([[]])
    return logits


def test_a_shape_is_recorded_when_it_is_met_for_the_third_time(recorded: list[int]) -> None:
    runner, sequence = ModelRunner(tiny_models.build("llama"), 1), [7]
    with runner.active():
        assert runner._graphs is not None
        replays = []
        for nodes in (5, 6, 5, 5, 13, 5):
            logits = forward(runner, sequence, nodes)
            assert logits.shape[0] == nodes
            replays.append(runner._graphs.replays)
            sequence.append(8)
    assert replays == [0, 0, 1, 2, 2, 3], "5 and 6 nodes are one shape, 13 another"


def test_a_step_runs_in_the_smallest_shape_recorded_that_holds_it(recorded: list[int]) -> None:
    runner, sequence = ModelRunner(tiny_models.build("llama"), 1), [7]
    with runner.active():
        assert runner._graphs is not None
        replays = []
        for nodes in (12, 12, 12, 6, 6, 8, 4, 24, 24, 24, 12):
            logits = forward(runner, sequence, nodes)
            plain = tiny_models.build("llama")(torch.tensor([sequence])).logits[0, -1]
            torch.testing.assert_close(logits[0], plain, atol=2e-4, rtol=1e-4)
            replays.append(runner._graphs.replays)
            sequence.append(8)
        assert runner._graphs.captures == 2
        sizes = [bucket.steps[0].sizes.tokens for bucket in runner._graphs._recorded]
    assert replays == [0, 0, 1, 2, 3, 4, 4, 4, 4, 5, 6], "4 would be more than doubled"
    assert sizes == [24, 12], "the one used last comes last"


def test_when_the_storage_grows_recording_starts_again(recorded: list[int]) -> None:
    runner, sequence = ModelRunner(tiny_models.build("llama"), 1), list(range(3, 90)) * 3
    with runner.active():
        assert runner._graphs is not None
        for _ in range(5):
            forward(runner, sequence[:250], 1)
            runner.shorten(0, 249)
        assert runner._graphs.replays == 2
        forward(runner, sequence, 1)
        grown = forward(runner, [*sequence, 5], 1)
        assert runner._graphs.replays == 2
    plain = tiny_models.build("llama")(torch.tensor([[*sequence, 5]])).logits[0, -1:]
    torch.testing.assert_close(grown, plain, atol=2e-4, rtol=1e-4)


def test_all_users_of_a_pool_record_again_when_it_grows(recorded: list[int]) -> None:
    model, pool = tiny_models.build("llama"), KVPool(1)
    pool.layer(0, torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
    reads = [model.get_input_embeddings()]
    graphs = [
        StepGraphs(model, pool, CPU),
        ReadingGraphs(model, pool, CPU, reads),
    ]
    before = pool.generation
    for user in graphs:
        user._recorded[object()] = user._warm[object()] = object()  # type: ignore[index, assignment]
    pool.reserve(pool.capacity)
    assert pool.generation == before
    assert all(user._recorded for user in graphs)
    pool.reserve(pool.capacity + 1)
    assert pool.generation > before
    assert not any(user._recorded or user._warm for user in graphs)
    with pytest.raises(torch.OutOfMemoryError):
        pool.retried(no_room)
    assert [user.refusal for user in graphs] == [step_graphs.OUT_OF_MEMORY] * 2
    for user in graphs:
        user.close()
    assert not pool.before_resize
    assert not pool.when_full


def no_room() -> None:
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(("rows", "capacity"), [(1, 1024), (8, 1024), (16, 512)])
def test_room_is_made_at_the_start(rows: int, capacity: int, recorded: list[int]) -> None:
    runner = ModelRunner(tiny_models.build("llama"), rows)
    runner.expected_length = 1024 - step_graphs.DRAFT_ROOM
    with runner.active():
        assert runner.rows.pool.capacity == capacity, "but not for more tokens than is reasonable"


@pytest.mark.parametrize(("most", "captures"), [(2**13, 1), (2**9, 5)])
def test_captures_of_two_thousand_tokens(
    most: int, captures: int, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size of steps is captured once, and again when the KV pool grows, which is rare."""
    monkeypatch.setattr(kv_cache, "MAX_RESERVED", most)
    monkeypatch.setattr(step_graphs, "MAX_RESERVED", most)
    runner, sequence = ModelRunner(tiny_models.build("llama"), 1), [7]
    # Expect more tokens than may be reserved at once, so that the pool grows.
    runner.expected_length = 2**17
    with runner.active():
        assert runner._graphs is not None
        while len(sequence) < 2000:
            sequence += [3, 8, 9, 4, 5, 6, 2, 7] * 2
            logits = forward(runner, sequence, 2)
        assert runner._graphs.captures == captures
        assert runner._graphs.replays > 100
    plain = tiny_models.build("llama")(torch.tensor([sequence])).logits[0, -1]
    torch.testing.assert_close(logits[0], plain, atol=2e-4, rtol=1e-4)


def test_few_tokens_and_all_of_them_are_shapes_of_their_own(recorded: list[int]) -> None:
    """A processor that joins a running batch may need all tokens."""
    draft = few_tokens_draft()
    head: Any = draft.get_output_embeddings()
    runner, sequence, widths = ModelRunner(draft, 1), [7], []
    with runner.active():
        assert runner._graphs is not None
        for step in range(8):
            with head.restrict_logits() if step < 4 else nullcontext():
                widths.append(forward(runner, sequence, 3).shape[1])
            sequence.append(8)
        assert runner._graphs.captures == 2
    assert widths == [4] * 4 + [tiny_models.VOCAB] * 4


def test_long_steps_run_as_they_come(shapes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPH_TOKENS", 20)
    monkeypatch.setattr(step_graphs, "MAX_QUERIES", 5)
    runner, sequence = ModelRunner(tiny_models.build("llama"), 1), list(range(3, 40))
    with padded_steps(), runner.active():
        for nodes in (1, 2, 4, 8, 2):
            forward(runner, sequence, nodes)
            sequence.append(8)
    assert [size for _, size in shapes] == [2, 4], "the prompt was too long, and 8 nodes in one row"


def test_few_shapes_are_recorded_and_those_used_last_stay(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    runner, sequence = ModelRunner(tiny_models.build("llama"), 1), [7]
    with runner.active():
        graphs = runner._graphs
        assert graphs is not None
        # Steps of 1, 48 and 64 tokens occur once and are not recorded.
        for nodes in (4, 4, 4, 1, 48, 64, 12, 12, 12, 4, 30, 30, 30):
            forward(runner, sequence, nodes)
            sequence.append(8)
        assert [bucket.steps[0].sizes.tokens for bucket in graphs._recorded] == [4, 32]
        assert len(graphs._warm) <= 2
        monkeypatch.setattr(step_graphs, "MAX_OUTPUT_BYTES", graphs._output_bytes() - 1)
        for _ in range(3):
            forward(runner, sequence, 12)
            sequence.append(8)
        assert [bucket.steps[0].sizes.tokens for bucket in graphs._recorded] == [12]
        before = graphs.replays
        monkeypatch.setattr(step_graphs, "MAX_OUTPUT_BYTES", 1)
        for _ in range(4):
            forward(runner, sequence, 60)
            sequence.append(8)
        assert graphs.replays == before, "its outputs alone are too many"


class TestLaterCalls:
    """Graphs that are recorded in one call and replayed in later ones."""

    @staticmethod
    def counts(kind: str = "one", model: Any = None, **options: Any) -> tuple[int, int]:
        model = model or tiny_models.build("llama")
        call = {**tiny_models.prompts("llama", kind), "max_new_tokens": 12, "do_sample": False}
        options = options or {"spec_strategy": "lookup"}
        output = model.generate(**call, **options, return_dict_in_generate=True)
        assert torch.equal(output.sequences, model.generate(**call))
        return output.spec_stats.graph_captures, output.spec_stats.graph_replays

    @pytest.mark.parametrize("kind", ["one", "ragged"])
    def test_nothing_is_recorded_twice(self, kind: str, recorded: list[int]) -> None:
        first, once = self.counts(kind)
        again, more = self.counts(kind)
        assert first > 0
        assert again == 0
        assert more > once

    def test_another_batch_size_takes_the_place(self, recorded: list[int]) -> None:
        model = tiny_models.build("llama")
        first, _ = self.counts()
        for kind in ("ragged", "one"):
            self.counts(kind)
            assert graph_store._stored[model].buffers[0][0].shape[0] == len(
                tiny_models.prompts("llama", kind)["input_ids"]
            )
        assert first > 0
        assert self.counts()[0] == 0

    def test_a_large_pool_is_not_kept(
        self, recorded: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(step_graphs, "MAX_STORED_TOKENS", 100)
        self.counts()
        assert len(graph_store._stored) == 0

    def test_a_draft_model_keeps_its_own(self, recorded: list[int]) -> None:
        options = tiny_models.speculation("llama", "draft")
        self.counts(**options)
        before = list(recorded)
        self.counts(**options)
        assert all(later > first for first, later in zip(before, recorded[2:], strict=True))

    def test_a_draft_model_of_few_tokens_keeps_its_own(self, recorded: list[int]) -> None:
        options = {"spec_strategy": "draft", "assistant": few_tokens_draft()}
        self.counts(**options)
        first = list(recorded)
        self.counts(**options)
        assert recorded[2] > first[0] > 0

    def test_a_model_that_has_changed_is_recorded_again(self, recorded: list[int]) -> None:
        model = copy.deepcopy(tiny_models.build("llama"))
        self.counts(model=model)
        assert self.counts(model=model)[0] == 0
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
        assert self.counts(model=model)[0] == 0, "graphs read the weights where they stand"
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
        assert self.counts(model=model)[0] > 0

    @needs_compiler
    def test_compiled_layers(self, recorded: list[int]) -> None:
        """Stored graphs are tied to the state of a model with its compiled layers installed."""
        model = copy.deepcopy(tiny_models.build("llama"))
        assert hf_spec.compile(model).layers == 3
        first, _ = self.counts(model=model)
        assert first > 0
        assert self.counts(model=model)[0] == 0

    def test_after_an_exception(self, recorded: list[int]) -> None:
        def fail(ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] % 9 == 0:
                raise ZeroDivisionError
            return scores

        first, _ = self.counts()
        call = {**tiny_models.prompts("llama", "one"), "spec_strategy": "lookup"}
        with pytest.raises(ZeroDivisionError):
            tiny_models.build("llama").generate(**call, logits_processor=[fail])
        assert first > 0
        assert self.counts()[0] == 0

    def test_what_is_kept_can_be_given_back(self, recorded: list[int]) -> None:
        first, _ = self.counts()
        with cuda_graphs("auto"):
            assert self.counts()[0] == 0
        set_cuda_graphs("auto")
        assert self.counts()[0] == first

    def test_a_batch_whose_rows_follow_one_another_keeps_its_storage(
        self, recorded: list[int]
    ) -> None:
        model = tiny_models.build("llama")
        prompts = [tiny_models.settled_prompt("llama")[0].tolist()] * 3
        for _ in range(2):
            outputs = model.generate_batch(
                prompts, spec_strategy="lookup", max_new_tokens=6, do_sample=False
            )
            assert len(outputs) == 3
        assert len(graph_store._stored) == 0


def test_a_forward_that_waits_is_found_before_it_is_recorded(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the reference implementations wait, which run instead of the kernels."""
    monkeypatch.setattr(step_graphs, "NoWaits", NoWaits)
    with using("torch"), caplog.at_level(logging.INFO, logger="hf_spec"):
        for _ in range(2):
            stats = generate("llama", "one", spec_strategy="lookup").spec_stats
            assert (stats.graph_captures, stats.graph_replays) == (0, 0)
            assert "makes the host wait for the cpu" in stats.graph_refusal
            monkeypatch.setattr(step_graphs, "NoWaits", None)
    lines = [r for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert [line.levelname for line in lines] == ["WARNING"]


def test_a_recording_that_fails_is_not_tried_again(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(*_: Any) -> None:
        tried.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr(step_graphs.Shape, "record", fail)
    plain = generate("llama", "one")
    for _ in range(2):
        output = generate("llama", "one", spec_strategy="lookup")
        assert torch.equal(output.sequences, plain.sequences)
        assert output.spec_stats.graph_refusal == "recording failed: no"
    assert tried == [1]


class TestOutOfMemory:
    """Retries of steps that run out of memory, after graphs, stored pools and room are freed."""

    @staticmethod
    def check(model: Any, refusal: str | None) -> None:
        call = {**tiny_models.prompts("llama", "one"), "max_new_tokens": 12, "do_sample": False}
        # Few nodes, since storage for drafted ones counts.
        config = hf_spec.LookupConfig(copy_length=4)
        output = model.generate(**call, spec_strategy=config, return_dict_in_generate=True)
        assert torch.equal(output.sequences, model.generate(**call))
        assert output.spec_stats.graph_refusal == refusal
        assert output.spec_stats.memory_retries == (refusal is not None)
        assert output.spec_stats.kv_pool_bytes > 0
        assert (output.spec_stats.graph_captures > 0) == (refusal is None)

    @pytest.fixture
    def model(self) -> Any:
        return copy.deepcopy(tiny_models.build("llama"))

    def test_a_step(self, model: Any, recorded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """The second step fails; keys and values of the first are kept."""
        compute, calls = ModelRunner._compute, []

        def failing(self: ModelRunner, *args: Any) -> list[Tensor]:
            calls.append(self.rows.pool.capacity)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("no room")
            return compute(self, *args)

        monkeypatch.setattr(ModelRunner, "_compute", failing)
        other = torch.nn.Linear(1, 1)
        graph_store.put(other, StoredGraphs("a", None, 1, ({}, {}), {}, None))
        self.check(model, step_graphs.OUT_OF_MEMORY)
        length = tiny_models.prompts("llama", "one")["input_ids"].shape[1]
        assert calls[0] == calls[1] > length + 12
        assert length < calls[2] < length + 12
        assert other not in graph_store._stored
        self.check(model, None)

    def test_the_storage_itself(self, model: Any, recorded: list[int]) -> None:
        """The device is too small for the expected length, but large enough for the actual one."""
        with pytest.MonkeyPatch.context() as patch:
            make = torch.Tensor.new_zeros

            def limited(like: Tensor, *size: int) -> Tensor:
                made = make(like, *size)
                if made.ndim == 4 and made.shape[2] > 300:
                    raise torch.OutOfMemoryError("no room")
                return made

            patch.setattr(torch.Tensor, "new_zeros", limited)
            runner, sequence = ModelRunner(model, 1), [7]
            runner.expected_length = 8000
            with runner.active():
                assert runner._graphs is not None
                for _ in range(6):
                    logits = forward(runner, sequence, 3)
                    sequence.append(8)
                assert runner.rows.pool.capacity < 100
                assert runner._graphs.refusal == step_graphs.OUT_OF_MEMORY
        plain = model(torch.tensor([sequence[:-1]])).logits[0, -1]
        torch.testing.assert_close(logits[0], plain, atol=2e-4, rtol=1e-4)

    def test_recording(
        self, model: Any, recorded: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(step_graphs.Shape, "record", fail)
            self.check(model, step_graphs.OUT_OF_MEMORY)
        self.check(model, None)

    @pytest.mark.parametrize(
        ("build", "name", "times"),
        [(tiny_models.build, "llama", 2), (hybrid_models.build, "qwen3_next", 1)],
    )
    def test_it_is_raised(self, build: Callable[[str], Any], name: str, times: int) -> None:
        """It is raised the second time, or at once if states may have changed."""
        calls = []

        def fail(*_: Any) -> list[Tensor]:
            calls.append(1)
            raise torch.OutOfMemoryError("no room")

        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            self.run_once(fail, build(name))
        assert len(calls) == times

    def test_what_the_failed_step_made_is_gone(self) -> None:
        made: list[Any] = []

        def compute(tensors: list[Tensor], step: PackedStep) -> list[Tensor]:
            large = torch.zeros(1000)
            if not made:
                made.append(weakref.ref(large))
                raise torch.OutOfMemoryError("no room")
            assert made[0]() is None
            return tensors

        assert self.run_once(compute)[0].tolist() == [5]

    @staticmethod
    def run_once(compute: Any, model: Any = None) -> list[Tensor]:
        model = model or tiny_models.build("llama")
        graphs = StepGraphs(model, KVPool(1), torch.device("cpu"))
        return graphs.run(compute, [torch.tensor([5])], PackedStep(KVPool(1), ()))


class TestObstacles:
    """Obstacles to the recording of steps."""

    def test_a_model_on_the_cpu(self, caplog: pytest.LogCaptureFixture) -> None:
        model = tiny_models.build("llama")
        assert obstacle(model) == "it is on cpu"
        with caplog.at_level(logging.INFO, logger="hf_spec"):
            for _ in range(2):
                generate("llama", "one", spec_strategy="lookup")
        lines = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
        assert lines == ["steps of LlamaForCausalLM run without CUDA graphs: it is on cpu"]

    def test_weights_in_several_places(self) -> None:
        model = copy.deepcopy(tiny_models.build("llama"))
        model.lm_head.to("meta")
        assert obstacle(model) == "its weights are on cpu, meta"

    @pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
    def test_hooks(self, kind: str) -> None:
        model = on_meta()
        getattr(model.model.norm, kind)(lambda *_: None)
        assert obstacle(model) == "model.norm has hooks"

    @pytest.mark.parametrize("threshold", [0.0, 6.0])
    def test_eight_bits(self, threshold: float) -> None:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        model = on_meta()
        part = model.model.layers[1].mlp
        part.up_proj = bitsandbytes.nn.Linear8bitLt(4, 4, threshold=threshold, device="meta")
        found = obstacle(model)
        assert found is not None
        if threshold:
            assert found.startswith("model.layers.1.mlp.up_proj looks for outliers on the host")
        else:
            assert found == "it is on meta"

    def test_switched_off(self) -> None:
        with cuda_graphs("auto"):
            set_cuda_graphs("off")
            assert obstacle(tiny_models.build("llama")) == "set_cuda_graphs('off')"
        assert obstacle(tiny_models.build("llama")) == "it is on cpu"


def on_meta() -> Any:
    return copy.deepcopy(tiny_models.build("llama")).to("meta")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("strategy", ["lookup", "draft", "tree"])
def test_recorded_steps_say_the_same_on_a_gpu(
    strategy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    close = StepGraphs.close
    monkeypatch.setattr(
        StepGraphs, "close", lambda self: (replays.append(self.replays), close(self))
    )
    options = tiny_models.speculation("llama", strategy)
    if "assistant" in options:
        options["assistant"] = copy.deepcopy(options["assistant"]).cuda()
    if strategy == "tree":
        # Trees have few sizes, so that the target's steps are recorded too.
        options["spec_strategy"] = hf_spec.TreeConfig(length_policy="static", max_nodes=15)
    said = []
    for mode in ("off", "auto"):
        with cuda_graphs(mode):
            said.append(on_cuda(kind, **options))
    assert torch.equal(*said)
    runners = len(replays) // 2
    assert not any(replays[:runners])
    assert all(replays[runners:])


@pytest.mark.gpu
def test_a_forward_that_waits_is_run_as_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(tiny_models.build("llama")).cuda()
    norm = model.model.norm.forward
    model.model.norm.forward = lambda states: norm(states) * max(1.0, -float(states.norm()))
    plain = on_cuda("one", model)
    with caplog.at_level(logging.INFO, logger="hf_spec"):
        assert torch.equal(on_cuda("one", model, spec_strategy="lookup"), plain)
    assert sum("makes the host wait" in r.getMessage() for r in caplog.records) == 1


def on_cuda(kind: str, model: Any = None, **options: Any) -> Tensor:
    model = model or copy.deepcopy(tiny_models.build("llama")).cuda()
    batch = {name: t.cuda() for name, t in tiny_models.prompts("llama", kind).items()}
    return model.generate(**batch, max_new_tokens=24, do_sample=False, **options)


@pytest.mark.parametrize(
    ("experts", "operation", "has_kernel", "advice"),
    [
        ("eager", "nonzero", True, "'batched_mm' or 'grouped_mm'"),
        ("eager", "nonzero", False, "'batched_mm'"),
        ("grouped_mm", "_grouped_mm", False, "'batched_mm'"),
        ("grouped_mm", "grouped_mm_fallback", False, "'batched_mm'"),
        ("grouped_mm", "nonzero", False, None),
        (None, "_grouped_mm", False, None),
    ],
)
def test_experts_that_wait_are_replaced_by_those_that_do_not(
    experts: str | None,
    operation: str,
    has_kernel: bool,
    advice: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Experts(torch.nn.Linear):
        config = SimpleNamespace(_experts_implementation=experts)

        def forward(self, _: Tensor) -> Tensor:
            raise WaitError(operation, "cuda")

    monkeypatch.setattr(step_graphs, "grouped_mm_waits", lambda _: not has_kernel)
    with pytest.raises(WaitError) as raised:
        Experts(2, 2)(torch.ones(1, 2))
    reason = f"{operation} makes the host wait for the cuda, in Experts"
    if advice is not None:
        reason += f"; load the model with experts_implementation={advice}"
    assert step_graphs._wait_reason(raised.value) == reason
