"""Layers whose small operations are fused for a GPU, tested with code for the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import _inductor

import hf_spec
from hf_spec.engine.fast import fused_layer
from hf_spec.engine.fast.compiled_layers import BACKENDS, Backend, CompiledLayers
from hf_spec.engine.fast.fused_layer import FusedLayer, fuse_layer
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.sdsat.adaptive_tokens import AdaptiveTokens, from_adapter
from tests import tiny_models
from tests.compiler import needs_compiler

# Windows in some or all layers, a softcap, norms of heads, learned positions, biases.
MODELS = ["llama", "gemma2", "gemma3", "mistral_sliding", "opt", "gpt_neox", "olmo2", "qwen3"]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fuse layers on this device; record the attention module of each that runs."""
    found: list[Any] = []
    run = FusedLayer.__call__

    def note(self: FusedLayer, *rest: Any) -> Any:
        found.append(self._attention)
        return run(self, *rest)

    monkeypatch.setattr(FusedLayer, "__call__", note)
    monkeypatch.setitem(
        BACKENDS, tiny_models.DEVICE.type, Backend(fuse_layer, FusedLayer, (torch.float32,))
    )
    return found


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run graphs as they were traced, which takes no time to compile."""
    monkeypatch.setattr(_inductor, "compile", lambda module, inputs, options: module)


def check(name: str, ran: list[Any]) -> None:
    target = copy.deepcopy(tiny_models.build(name))
    report = hf_spec.compile(target)
    assert (report.layers, report.refused) == (3, {})
    for kind, strategy in (("one", "lookup"), ("ragged", "tree"), ("ragged", "none")):
        ran.clear()
        given = {**tiny_models.prompts(name, kind), "max_new_tokens": 10, "do_sample": False}
        found = target.generate(**given, **tiny_models.speculation(name, strategy))
        assert torch.equal(found, target.generate(**given))
        assert ran, "every strategy runs fused layers"


@pytest.mark.by_default(name=tuple(MODELS[:-1]))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("interpreted")
def test_tokens_of_plain_generate(name: str, fused: list[Any]) -> None:
    check(name, fused)


@torch.no_grad()
def check_lora(name: str, ran: list[Any]) -> None:
    """Check that a LoRA is fused, and that even an infinite one leaves other tokens unchanged."""
    target = copy.deepcopy(tiny_models.build(name))
    assert hf_spec.compile(target).layers == 3
    tokens, nodes = from_adapter(target, tiny_models.random_adaptive_tokens(target)), [7, 9, -1, -1]
    endless = {name: (down, up / 0) for name, (down, up) in tokens.lora.weights.items()}
    tree, found = DraftTree.from_rows([(nodes, [-1, 0, 1, 2])]), []
    for lora, mode in ((tokens.lora.weights, "off"), (tokens.lora.weights, "on"), (endless, "on")):
        ran.clear()
        hf_spec.compile(target, mode)
        adapted = AdaptiveTokens(tokens.shape, tokens.embeddings, lora)
        runner = ModelRunner(target, 1, virtual_tokens=adapted)
        with runner.active():
            found.append(runner.forward(tree, [[5, 7]]).logits)
        assert len(ran) >= (3 if mode == "on" else 0)
        assert not CompiledLayers.of(target).refused
    expected, fused, endless_logits = found
    torch.testing.assert_close(fused, expected)
    assert torch.equal(endless_logits[:2], fused[:2])
    assert not endless_logits[2:].isfinite().any()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_lora_of_chosen_tokens_is_fused(name: str, fused: list[Any]) -> None:
    check_lora(name, fused)


@pytest.mark.full
@needs_compiler
def test_a_lora_of_chosen_tokens_with_generated_code(fused: list[Any]) -> None:
    check_lora("llama", fused)


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_with_generated_code(name: str, fused: list[Any]) -> None:
    check(name, fused)


def test_a_layer_that_computes_something_else_is_not_used(
    fused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(module: Any, inputs: Any, options: Any) -> Callable[..., Any]:
        return lambda *tensors: [2 * part for part in module(*tensors)]

    monkeypatch.setattr(_inductor, "compile", wrong)
    target = copy.deepcopy(tiny_models.build("llama"))
    report = hf_spec.compile(target)
    assert report.layers == 0
    assert {*report.refused.values()} == {"its compiled layer computes something else"}
    given = {**tiny_models.prompts("llama", "one"), "max_new_tokens": 10, "do_sample": False}
    found = target.generate(**given, spec_strategy="lookup")
    assert torch.equal(found, target.generate(**given))


def test_code_for_some_lengths_only_is_refused(
    fused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated code may assume more about the number of tokens than the layer does."""

    def assume(module: Any, inputs: Any, options: Any) -> Any:
        assert any(type(size) is not int and size < 9 for one in inputs for size in one.shape)
        return module

    monkeypatch.setattr(_inductor, "compile", assume)
    report = hf_spec.compile(copy.deepcopy(tiny_models.build("llama")))
    assert report.layers == 0
    assert all("branches on the number of tokens" in why for why in report.refused.values())


@pytest.mark.usefixtures("interpreted")
def test_nothing_is_held_after_a_step(fused: list[Any]) -> None:
    """A reference to the step would keep keys and values alive."""
    hf_spec.compile(copy.deepcopy(tiny_models.build("llama")))
    assert fused
    assert fused_layer._running.layer is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Fused layers are captured and generate the tokens of the uncompiled engine."""
    target = copy.deepcopy(tiny_models.build("llama")).to("cuda", dtype)
    given = {name: value.cuda() for name, value in tiny_models.prompts("llama", "one").items()}
    given |= {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(**given, spec_strategy="none").sequences
    report = hf_spec.compile(target)
    assert (report.layers, report.refused) == (3, {})
    first, again = (target.generate(**given, spec_strategy="lookup") for _ in range(2))
    assert first.spec_stats.graph_captures > 0
    assert again.spec_stats.graph_captures == 0
    assert again.spec_stats.graph_replays > 0
    if dtype == torch.float32:
        assert torch.equal(first.sequences, expected)
        assert torch.equal(again.sequences, expected)
