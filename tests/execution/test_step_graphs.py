"""Steps in the padded form of CUDA graphs: the same tokens, in few shapes; and what is recorded.

Without a GPU nothing can be recorded, but all that recording rests on runs on a CPU as well.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_spec
from hf_spec.execution import step_graphs
from hf_spec.execution.runner import ModelRunner
from hf_spec.execution.step_graphs import (
    StepGraphs,
    cuda_graphs,
    obstacle,
    padded_steps,
    set_cuda_graphs,
)
from hf_spec.execution.tree import DraftTree
from tests import tiny_models

# The adaptive tokens of `sdsat` run as they come.
STRATEGIES = [name for name in tiny_models.STRATEGIES if name not in {"none", "sdsat"}]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every shape that steps were padded to, as it was met first; emptied by nobody."""
    found: list[Any] = []
    create = step_graphs._Shape.__init__

    def remember(self: Any, tensors: Any, places: Tensor, *rest: Any) -> None:
        found.append((type(self), places.shape[1]))
        create(self, tensors, places, *rest)

    monkeypatch.setattr(step_graphs._Shape, "__init__", remember)
    return found


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    step_graphs._say_once.cache_clear()


def generate(name: str, kind: str, **options: Any) -> Any:
    return tiny_models.build(name).generate(
        **tiny_models.prompts(name, kind),
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


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


# Windows in some layers, a cap, sinks and experts, positions in an embedding.
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
    """Recording as on a GPU: a replay computes on the standing inputs, into the standing outputs.

    What one step left behind and the next one overwrites shows. Holds the replays of each runner.
    """
    replays: list[int] = []

    def record(self: StepGraphs, compute: Any, shape: Any) -> None:
        shape.outputs = [torch.full_like(t, torch.nan) for t in compute(*inputs_of(self, shape))]

        def replay() -> None:
            for standing, new in zip(shape.outputs, compute(*inputs_of(self, shape)), strict=True):
                standing.copy_(new)

        shape.graph = SimpleNamespace(replay=replay)

    def inputs_of(graphs: StepGraphs, shape: Any) -> tuple[Any, Any]:
        return shape.inputs, shape.step(graphs._pool)

    clear = StepGraphs.clear
    monkeypatch.setattr(step_graphs, "obstacle", lambda _: None)
    monkeypatch.setattr(step_graphs, "serves", lambda _: True)
    monkeypatch.setattr(StepGraphs, "_record", record)
    monkeypatch.setattr(
        StepGraphs, "clear", lambda self: (replays.append(self.replays), clear(self))
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
    assert sum(recorded) > 0
    assert len(recorded) == (1 if strategy == "lookup" else 2), "target, and draft model or head"
    assert torch.equal(replayed.sequences, generate("llama", kind).sequences)


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
        for nodes in (5, 6, 5, 5, 9, 5):
            logits = forward(runner, sequence, nodes)
            assert logits.shape[0] == nodes
            replays.append(runner._graphs.replays)
            sequence.append(8)
    assert replays == [0, 0, 1, 2, 2, 3], "5 and 6 nodes are one shape, 9 another"


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


def test_long_steps_and_too_many_shapes_run_as_they_come(
    shapes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(step_graphs, "MAX_TOKENS", 20)
    runner, sequence = ModelRunner(tiny_models.build("llama"), 1), list(range(3, 40))
    with padded_steps(), runner.active():
        for nodes in (1, 2, 4, 8, 2):
            forward(runner, sequence, nodes)
            sequence.append(8)
    assert [size for _, size in shapes] == [2, 4], "the prompt was too long"


class TestObstacles:
    """What keeps steps from being recorded."""

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

    def test_switched_off(self) -> None:
        with cuda_graphs("auto"):
            set_cuda_graphs("off")
            assert obstacle(tiny_models.build("llama")) == "set_cuda_graphs('off')"
        assert obstacle(tiny_models.build("llama")) == "it is on cpu"
        with pytest.raises(ValueError, match="unknown CUDA graph mode 'on'; choose one of auto"):
            set_cuda_graphs("on")


def on_meta() -> Any:
    return copy.deepcopy(tiny_models.build("llama")).to("meta")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("strategy", ["lookup", "draft", "tree"])
def test_recorded_steps_say_the_same_on_a_gpu(
    strategy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    clear = StepGraphs.clear
    monkeypatch.setattr(
        StepGraphs, "clear", lambda self: (replays.append(self.replays), clear(self))
    )
    options = tiny_models.speculation("llama", strategy)
    if "assistant" in options:
        options["assistant"] = copy.deepcopy(options["assistant"]).cuda()
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
    assert sum("recording failed" in r.getMessage() for r in caplog.records) == 1


def on_cuda(kind: str, model: Any = None, **options: Any) -> Tensor:
    model = model or copy.deepcopy(tiny_models.build("llama")).cuda()
    batch = {name: t.cuda() for name, t in tiny_models.prompts("llama", kind).items()}
    return model.generate(**batch, max_new_tokens=24, do_sample=False, **options)
