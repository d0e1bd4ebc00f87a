"""Compiled layers: the same tokens, and an unchanged model."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import fx, nn
from torch.nn import functional as F

import hf_spec
from hf_spec.backend.cpu.layer_source import LayerSource, layer_source
from hf_spec.backend.device.capture import NoWaits
from hf_spec.engine.fast import layer_tracing as layer_programs
from hf_spec.engine.fast.compiled_layers import CompiledLayers, compiling
from hf_spec.engine.fast.layer_call import BoundLayer
from hf_spec.engine.fast.layer_state import LayerState
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.low_rank_change import changes_in
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.registry import parse_strategy
from hf_spec.methods.sdsat.adaptive_tokens import AdaptiveTokens, from_adapter
from tests import tiny_models
from tests.compiler import needs_compiler

# Windows in some layers, a softcap, learned positions, norms elsewhere, biases.
MODELS = ["llama", "gemma2", "gemma3", "opt", "gpt_neox", "phi3", "qwen2_sliding", "olmo2"]

pytestmark = needs_compiler


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the attention module of each layer that runs compiled."""
    found: list[Any] = []
    run = BoundLayer.__call__

    def note(self: BoundLayer, *rest: Any) -> Any:
        found.append(self._attention)
        return run(self, *rest)

    monkeypatch.setattr(BoundLayer, "__call__", note)
    return found


def model(name: str) -> Any:
    return copy.deepcopy(tiny_models.build(name))


def generate(target: Any, name: str, kind: str = "one", **options: Any) -> torch.Tensor:
    prompts = tiny_models.prompts(name, kind)
    sequences: torch.Tensor = target.generate(
        **prompts, max_new_tokens=10, do_sample=False, **options
    )
    return sequences


def forwards(target: nn.Module) -> list[str]:
    return [name for name, module in target.named_modules() if "forward" in module.__dict__]


@pytest.mark.by_default(name=("llama", "gemma3", "gpt_neox"))
@pytest.mark.parametrize("name", MODELS)
def test_programs_give_the_tokens_of_plain_generate(name: str, runs: list[Any]) -> None:
    target = model(name)
    report = hf_spec.compile(target)
    assert (report.layers, report.refused) == (3, {})
    for kind, strategy in (("one", "lookup"), ("ragged", "tree"), ("ragged", "none")):
        before = len(runs)
        options = tiny_models.speculation(name, strategy)
        found = generate(target, name, kind, **options)
        assert torch.equal(found, generate(target, name, kind))
        assert len(runs) > before, "every strategy runs programs"
    assert not forwards(target)


def test_layers_are_compiled_in_a_step_that_must_not_wait(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is so before the capture of a CUDA graph; results are compared on the host."""
    compute = ModelRunner._compute

    def strict(self: ModelRunner, *arguments: Any) -> Any:
        with NoWaits(torch.device("cpu")):
            return compute(self, *arguments)

    monkeypatch.setattr(ModelRunner, "_compute", strict)
    target = model("llama")
    assert hf_spec.compile(target).layers == 3
    assert torch.equal(generate(target, "llama", spec_strategy="none"), generate(target, "llama"))
    assert runs


def test_a_draft_model_is_compiled_likewise(runs: list[Any]) -> None:
    target, options = model("llama"), tiny_models.speculation("llama", "tree")
    draft = options["assistant"] = copy.deepcopy(options["assistant"])
    hf_spec.compile(draft)
    assert torch.equal(generate(target, "llama", **options), generate(target, "llama"))
    assert set(runs) == {layer.self_attn for layer in draft.model.layers}
    assert not forwards(draft)


def test_a_draft_model_checks_its_layers_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Any] = []
    holds = LayerState.holds

    def note(self: LayerState) -> bool:
        checks.append(self)
        return holds(self)

    monkeypatch.setattr(LayerState, "holds", note)
    target, options = model("llama"), tiny_models.speculation("llama", "draft")
    draft = copy.deepcopy(options.pop("assistant"))
    hf_spec.compile(target)
    hf_spec.compile(draft)
    checks.clear()
    options["spec_strategy"] = hf_spec.DraftConfig(max_draft_tokens=4, length_policy="static")
    found: Any = generate(target, "llama", assistant=draft, return_dict_in_generate=True, **options)
    stats = found.spec_stats
    by_state = [checks.count(state) for state in set(checks)]
    # The state is read, not checked, in the first pass of each model.
    assert len(by_state) == 2
    assert max(by_state) == stats.target_forwards - 1
    assert stats.draft_forwards > 2 * stats.target_forwards


@pytest.mark.parametrize(("name", "programs"), [("llama", 1), ("gemma3", 2)])
def test_layers_of_a_kind_share_programs(name: str, programs: int) -> None:
    """One function handles any number of tokens; layers with and without a window differ."""
    assert hf_spec.compile(model(name)).programs == programs


def test_new_weights_are_used(runs: list[Any]) -> None:
    target = model("llama")
    hf_spec.compile(target)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight.mul_(-2)
            layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight * 0.5)
    expected = generate(target, "llama")
    assert not torch.equal(expected, generate(model("llama"), "llama"))
    assert torch.equal(generate(target, "llama", spec_strategy="lookup"), expected)
    assert runs


def test_autocast_that_begins_inside_the_model_is_left_alone(runs: list[Any]) -> None:
    """This occurs in a model that accelerate prepared for mixed precision."""
    target = model("llama")
    hf_spec.compile(target)
    generate(target, "llama", spec_strategy="lookup")
    runs.clear()
    target.forward = torch.autocast("cpu", torch.bfloat16)(target.forward)
    found = generate(target, "llama", spec_strategy="lookup")
    assert runs == []
    assert torch.equal(found, generate(target, "llama"))


def test_a_program_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, runs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: fx.Graph, num_constants: int) -> LayerSource:
        source = layer_source(graph, num_constants)
        return replace(source, text=source.text.replace("square(", "cube("))

    monkeypatch.setattr(layer_programs, "layer_source", broken)
    target = model("llama")
    with caplog.at_level(logging.WARNING):
        report = hf_spec.compile(target)
    assert report.layers == 0
    assert set(report.refused.values()) == {"its compiled layer computes something else"}
    assert sum("something else" in line for line in caplog.messages) == 1
    tried = len(runs)
    found = generate(target, "llama", spec_strategy="lookup")
    assert torch.equal(found, generate(target, "llama"))
    assert len(runs) == tried


@pytest.mark.parametrize("name", ["llama4", "gpt_oss", "gpt2"])
def test_what_there_is_no_program_for_runs_as_it_is(name: str) -> None:
    """Objects passed to layers; experts whose shapes depend on the data; other linear modules."""
    target = model(name)
    report = hf_spec.compile(target)
    assert report.layers == 0
    assert len(report.refused) == 3
    found = generate(target, name, spec_strategy="lookup")
    assert torch.equal(found, generate(target, name))


class Turning(nn.Module):
    """MLP that computes something else for many tokens."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) if states.shape[1] < 7 else -2 * self.inner(states)


def test_a_program_that_holds_for_few_numbers_of_tokens_is_not_used(runs: list[Any]) -> None:
    target = model("llama")
    for layer in target.model.layers:
        layer.mlp = Turning(layer.mlp)
    report = hf_spec.compile(target)
    assert report.layers == 0
    assert len(report.refused) == 3
    assert all("number of tokens" in reason for reason in report.refused.values())
    runs.clear()
    hidden = []
    for mode in ("on", "off"):
        hf_spec.compile(target, mode)
        runner = ModelRunner(target, 1)
        tree = DraftTree.from_rows([([5] * 12, list(range(-1, 11)))])
        with torch.no_grad(), runner.active():
            hidden.append(runner.forward(tree, [[5]]).logits)
    assert torch.equal(*hidden)


class Untraceable(nn.Module):
    """MLP that fails if its input has no contents, as in tracing."""

    def __init__(self, inner: nn.Module, error: type[Exception]):
        super().__init__()
        self.inner, self.error = inner, error

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if type(states) is not torch.Tensor:
            raise self.error
        return self.inner(states)


@pytest.mark.parametrize("error", [KeyError, AttributeError, OSError, AssertionError])
def test_whatever_goes_wrong_in_tracing_is_a_reason(error: type[Exception]) -> None:
    target = model("llama")
    for layer in target.model.layers:
        layer.mlp = Untraceable(layer.mlp, error)
    report = hf_spec.compile(target)
    assert set(report.refused.values()) == {error.__name__}
    found = generate(target, "llama", spec_strategy="lookup")
    assert torch.equal(found, generate(target, "llama"))


@pytest.mark.parametrize("product", ["q_proj", "k_proj", "down_proj"])
def test_forwards_that_products_are_given_later_count(product: str, runs: list[Any]) -> None:
    target = model("llama")
    hf_spec.compile(target)
    before = generate(target, "llama", spec_strategy="lookup")
    for name, linear in target.named_modules():
        if name.endswith(product):
            linear.forward = lambda x, linear=linear: -3 * F.linear(x, linear.weight)
    runs.clear()
    found = generate(target, "llama", spec_strategy="lookup")
    assert torch.equal(found, generate(target, "llama"))
    assert not torch.equal(found, before)
    assert runs == []


@pytest.mark.full
def test_an_adapter_that_is_chosen_later_counts(runs: list[Any]) -> None:
    """Names and scales of adapters are constants of a compiled layer."""
    target = model("llama")
    configs = [LoraConfig(r=4, lora_alpha=a, target_modules=["down_proj"]) for a in (8, 32)]
    adapted = get_peft_model(target, configs[0], "first")
    adapted.add_adapter("second", configs[1])
    for part, weight in target.named_parameters():
        if "lora" in part:
            torch.manual_seed("second" in part)
            nn.init.normal_(weight)
    found = []
    for name in ("first", "second", "first"):
        adapted.set_adapter(name)
        target.eval()
        assert hf_spec.compile(target).layers == 3
        before = len(runs)
        found.append(generate(target, "llama", spec_strategy="lookup"))
        assert torch.equal(found[-1], generate(target, "llama"))
        assert len(runs) > before
    assert not torch.equal(found[0], found[1])


def test_hidden_states_are_those_of_programs(runs: list[Any]) -> None:
    """A draft head reads them; the means by which transformers collects them stay on the layers."""
    target, options = model("llama"), tiny_models.speculation("llama", "falcon")
    expected = generate(target, "llama")
    assert torch.equal(generate(target, "llama", **options), expected)
    assert hf_spec.compile(target).layers == 3
    before = len(runs)
    assert torch.equal(generate(target, "llama", **options), expected)
    assert len(runs) > before


def test_an_error_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model("llama")
    hf_spec.compile(target)
    expected = generate(target, "llama")

    def fail(*given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(BoundLayer, "__call__", fail)
        with pytest.raises(KeyboardInterrupt):
            generate(target, "llama", spec_strategy="lookup")
    assert not forwards(target)
    assert torch.equal(generate(target, "llama"), expected)
    assert torch.equal(generate(target, "llama", spec_strategy="lookup"), expected)


def test_nothing_is_compiled_unasked(runs: list[Any]) -> None:
    target = model("llama")
    for _ in range(3):
        generate(target, "llama", spec_strategy="lookup", assistant=None)
    assert not runs
    assert not CompiledLayers.of(target).functions


def test_the_option_holds_for_one_call(runs: list[Any]) -> None:
    target, config = model("llama"), hf_spec.LookupConfig(compile=True)
    plain = generate(target, "llama")
    assert torch.equal(generate(target, "llama", spec_strategy=config), plain)
    assert runs
    runs.clear()
    assert torch.equal(generate(target, "llama", spec_strategy="lookup"), plain)
    assert not runs
    assert not forwards(target)


def test_the_option_ends_with_a_call_that_fails() -> None:
    layers = CompiledLayers.of(model("llama"))
    with pytest.raises(RuntimeError, match="interrupted"), compiling(True):
        raise RuntimeError("interrupted")
    assert not layers.wanted


def test_the_option_overrides_a_compiled_model(runs: list[Any]) -> None:
    target = model("llama")
    hf_spec.compile(target)
    runs.clear()
    generate(target, "llama", spec_strategy=hf_spec.LookupConfig(compile=False))
    assert not runs
    generate(target, "llama", spec_strategy="lookup")
    assert runs


@pytest.mark.by_default(strategy=("falcon",))
@pytest.mark.parametrize("strategy", ["tree", "falcon"])
def test_the_option_compiles_what_drafts(strategy: str, runs: list[Any]) -> None:
    target, options = model("llama"), tiny_models.speculation("llama", strategy)
    options["spec_strategy"] = dataclasses.replace(
        parse_strategy(options["spec_strategy"]), compile=True
    )
    found = generate(target, "llama", "ragged", **options)
    assert torch.equal(found, generate(target, "llama", "ragged"))
    assert set(runs) - {layer.self_attn for layer in target.model.layers}


CHAIN = [7, -1, -1, -1]


@torch.no_grad()
def step_logits(target: Any, tokens: AdaptiveTokens, *steps: list[int]) -> list[torch.Tensor]:
    """Return the logits of successive chains of nodes, with the LoRA of adaptive tokens."""
    runner, text, found = ModelRunner(target, 1, virtual_tokens=tokens), [5], []
    with runner.active():
        for nodes in steps:
            text.append(7)
            tree = DraftTree.from_rows([(nodes, list(range(-1, len(nodes) - 1)))])
            found.append(runner.forward(tree, [text]).logits)
            runner.keep([[]])
    return found


def adaptive(target: Any) -> AdaptiveTokens:
    return from_adapter(target, tiny_models.random_adaptive_tokens(target))


@pytest.mark.by_default(name=("llama",))
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_the_lora_of_adaptive_tokens_is_compiled(name: str, runs: list[Any]) -> None:
    """The LoRA is installed after compilation; the chosen nodes differ in every step."""
    target = model(name)
    tokens = adaptive(target)
    steps = [[7], CHAIN, [7, 9, -1, 8], [7, 8], [7, 9, 9, -1]]
    found = []
    for mode in ("off", "on"):
        hf_spec.compile(target, mode)
        runs.clear()
        found.append(step_logits(target, tokens, *steps))
    assert len(runs) >= 3 * len(steps)
    assert not CompiledLayers.of(target).refused
    for compiled, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(compiled, expected)
    without = AdaptiveTokens(tokens.shape, tokens.embeddings)
    plain_logits = step_logits(target, without, *steps)
    for nodes, compiled, plain in zip(steps, found[1], plain_logits, strict=True):
        changed = (compiled - plain).abs().amax(-1) > 0
        assert changed.tolist() == [-1 in nodes[: end + 1] for end in range(len(nodes))]


@pytest.mark.parametrize("factor", [0.0, 50.0])
def test_nodes_without_a_lora_have_the_same_bits_whatever_others_get(factor: float) -> None:
    target = model("llama")
    tokens = adaptive(target)
    hf_spec.compile(target)
    nodes = [7, 9, 8, -1, -1]
    (expected,) = step_logits(target, AdaptiveTokens(tokens.shape, tokens.embeddings), nodes)
    lora = {name: (down, factor * up) for name, (down, up) in tokens.lora.weights.items()}
    (found,) = step_logits(target, AdaptiveTokens(tokens.shape, tokens.embeddings, lora), nodes)
    assert torch.equal(found[:3], expected[:3])
    assert torch.equal(found, expected) == (factor == 0)


def test_lora_weights_that_change_are_used() -> None:
    """Layers are not compiled again, and weights of the previous adapter are not used."""
    target = model("llama")
    hf_spec.compile(target)
    tokens = adaptive(target)
    (before,) = step_logits(target, tokens, CHAIN)
    programs = len(CompiledLayers.of(target).functions)
    name, (down, up) = next(iter(tokens.lora.weights.items()))

    def agrees(others: AdaptiveTokens) -> None:
        (found,) = step_logits(target, others, CHAIN)
        hf_spec.compile(target, "off")
        (expected,) = step_logits(target, others, CHAIN)
        hf_spec.compile(target)
        torch.testing.assert_close(found, expected)
        assert not torch.equal(found, before)

    other = {**tokens.lora.weights, name: (-2 * down, up)}
    agrees(AdaptiveTokens(tokens.shape, tokens.embeddings, other))
    del other[name]
    agrees(AdaptiveTokens(tokens.shape, tokens.embeddings, other))
    down.mul_(-3)
    agrees(tokens)
    assert len(CompiledLayers.of(target).functions) == programs + 1, "one without the first layer"


@torch.no_grad()
def test_lora_weights_that_change_during_a_generation_are_used() -> None:
    target = model("llama")
    hf_spec.compile(target)
    tokens, tree = adaptive(target), DraftTree.from_rows([(CHAIN, [-1, 0, 1, 2])])
    runner, found = ModelRunner(target, 1, virtual_tokens=tokens), []
    with runner.active():
        for factor in (1, -4, 1):
            for layer in target.model.layers:
                (change,) = changes_in(layer.mlp.up_proj)
                change.up = (change.up.T * factor).T
            found.append(runner.forward(tree, [[5, 7]]).logits)
            runner.shorten(0, 0)
    assert not torch.allclose(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_two_loras_act_in_threads_of_their_own() -> None:
    target = model("llama")
    hf_spec.compile(target)
    first = adaptive(target)
    double = {name: (2 * down, up) for name, (down, up) in first.lora.weights.items()}
    both = [first, AdaptiveTokens(first.shape, first.embeddings, double)]
    expected = [step_logits(target, tokens, *[CHAIN] * 20) for tokens in both]
    found: list[Any] = [None, None]

    def run(index: int) -> None:
        found[index] = step_logits(target, both[index], *[CHAIN] * 20)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(found[0][0], found[1][0])


class Halved(nn.Linear):
    """Linear layer whose low-rank change is added after its whole forward."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) / 2


@pytest.mark.parametrize("obstacle", ["another class", "a shared weight"])
def test_loras_of_other_layers_are_not_compiled(obstacle: str, runs: list[Any]) -> None:
    target = model("llama")
    for layer in target.model.layers:
        if obstacle == "another class":
            layer.mlp.up_proj.__class__ = Halved
        else:
            layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    tokens, found = adaptive(target), []
    for mode in ("off", "on"):
        hf_spec.compile(target, mode)
        runs.clear()
        found.append(step_logits(target, tokens, CHAIN)[0])
    assert not runs
    assert torch.equal(*found)
    reason = "Halved" if obstacle == "another class" else "shares its weight"
    assert all(reason in text for text in CompiledLayers.of(target).refused.values())


@pytest.mark.by_default(name=("llama",))
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2_sliding"])
@pytest.mark.parametrize("kind", ["one", "ragged"])
def test_compiled_loras_give_the_tokens_of_plain_generate(
    name: str, kind: str, runs: list[Any]
) -> None:
    target = model(name)
    hf_spec.compile(target)
    expected = generate(target, name, kind)
    runs.clear()
    for fused in (False, True):
        options = tiny_models.speculation(name, "sdsat")
        config = parse_strategy(options.pop("spec_strategy"))
        options["spec_strategy"] = dataclasses.replace(config, fused=fused)
        assert torch.equal(generate(target, name, kind, **options), expected)
    assert runs
    assert not CompiledLayers.of(target).refused


def test_only_compile_warns_of_layers_that_cannot_be_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = model("gpt_oss")
    with caplog.at_level(logging.WARNING):
        generate(target, "gpt_oss", spec_strategy=hf_spec.LookupConfig(compile=True))
        assert CompiledLayers.of(target).refused
        assert not caplog.messages
        CompiledLayers.of(target).refused.clear()
        hf_spec.compile(target)
        assert len(caplog.messages) == 1
