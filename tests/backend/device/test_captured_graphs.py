"""CUDA graphs on the fake GPU: target and head capture them once for all calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from torch import Tensor
from transformers import MaxLengthCriteria

from hf_spec import (
    BlockConfig,
    DraftConfig,
    EagleConfig,
    GemmaAssistantConfig,
    HeadsConfig,
    MtpConfig,
)
from hf_spec.adapters.published import read_published
from hf_spec.backend.device import graph_store
from hf_spec.backend.device.capture import cuda_graphs
from hf_spec.drafting.cost_model import cost_model_drafter
from hf_spec.drafting.cost_model.adaptive_length_drafter import adapt_length
from hf_spec.drafting.cost_model.cost_curves import RoundTimes
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import speculative_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward import kv_pool
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.block.layouts import build_block_head as build_block
from hf_spec.methods.eagle.head import build as build_eagle
from hf_spec.methods.falcon.drafter import FalconDrafter
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.lookup.drafter import LookupConfig, LookupDrafter
from hf_spec.methods.medusa.heads import build_medusa, build_mlp_speculator
from hf_spec.methods.registry import make_drafter
from tests import mtp_reference, tiny_models
from tests.fake_gpu import OnGpu, on_gpu, pretended, recording
from tests.falcon_reference import random_head
from tests.feature_reference import deepspec, dflash, dflash2, medusa, speculator
from tests.gemma_reference import random_assistant
from tests.generation.test_own_prefill import longrope
from tests.published_heads import sample

pytestmark = pytest.mark.usefixtures("no_stored_graphs")

NEW_TOKENS = 24
# Seconds per operation on the device, long enough to make the time of the host negligible.
LAUNCH = 10.0


@dataclass
class Family:
    """Kind of draft head.

    Attributes:
        make: function that returns the head for the tiny Llama, on the CPU.
        draft: function that returns its drafter for a target on the device.
        captures: True if the head's own forward passes are captured, too.
    """

    make: Callable[[], Any]
    draft: Callable[[Any, Any], Drafter]
    captures: bool = True


def eagle(kind: str, *aux: int) -> Callable[[], Any]:
    def make() -> Any:
        head = read_published(sample(kind).folder)
        assert head is not None
        reading = (("aux_layers", aux),) if aux else ()
        return build_eagle(replace(head, overrides=reading), tiny_models.build("llama"))

    return make


def by_pairs(head: Any, target: Any) -> Drafter:
    config = EagleConfig(max_draft_tokens=3, tree="chain", length_policy="static")
    return PairDrafter(config, head, LengthPolicy(3))


def by_modules(head: Any, target: Any) -> Drafter:
    # The target's embedding is not a module of the head.
    head._shared = [target.get_input_embeddings()]
    config = MtpConfig(max_draft_tokens=3, length_policy="static")
    return PairDrafter(config, head, LengthPolicy(3))


def by_blocks(head: Any, target: Any) -> Drafter:
    config = BlockConfig(max_draft_tokens=3, max_nodes=3, length_policy="static")
    return make_drafter(config, target, head)


def by_lists(head: Any, target: Any) -> Drafter:
    tree = [[0], [1], [0, 0], [0, 1]]
    return make_drafter(HeadsConfig(tree=tree, length_policy="static"), target, head)


def by_assistant(head: Any, target: Any) -> Drafter:
    config = GemmaAssistantConfig(
        max_draft_tokens=3, tree="dynamic", width=2, max_nodes=6, length_policy="static"
    )
    return make_drafter(config, target, head)


def by_rank_tree(head: Any, target: Any) -> Drafter:
    return FalconDrafter(head, RankTree.of([[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]))


def llama() -> Any:
    return tiny_models.build("llama")


FAMILIES = {
    "falcon": Family(lambda: random_head("llama"), by_rank_tree),
    "eagle": Family(eagle("eagle3"), by_pairs),
    "eagle, last state": Family(eagle("eagle"), by_pairs),
    "eagle, before the norm": Family(eagle("eagle3", 3, 1, 0), by_pairs),
    "gemma assistant": Family(lambda: random_assistant("llama"), by_assistant),
    "p-eagle": Family(eagle("peagle"), by_pairs),
    "mtp": Family(lambda: mtp_reference.sample("llama", "index").head, by_modules),
    "dflash": Family(lambda: build_block(dflash(), llama()), by_blocks),
    "dflash2": Family(lambda: build_block(dflash2(), llama()), by_blocks),
    "dspark": Family(lambda: build_block(deepspec("vanilla"), llama()), by_blocks),
    "medusa": Family(lambda: build_medusa(medusa(), llama()), by_lists, captures=False),
    "mlp speculator": Family(
        lambda: build_mlp_speculator(speculator(), llama()), by_lists, captures=False
    ),
}


@dataclass
class Call:
    """Graph counts of the target and of the head in one call, its tokens, and its memory."""

    target: tuple[int, int, str | None]
    head: tuple[int, int, str | None] | None
    tokens: list[list[int]]
    # Bytes of the KV pool, its growths, and its retries.
    memory: tuple[int, int, int]


@torch.no_grad()
def decode(model: Any, drafter: Drafter) -> Call:
    ids, mask = (OnGpu(t) for t in tiny_models.ragged_batch((9,)).values())
    length = ids.shape[1] + NEW_TOKENS
    stop = StopRules([MaxLengthCriteria(length)], 1)
    state = GenerationState.create(ids, mask, stop, expected_length=length)
    target = ModelRunner(model, 1, drafter.hidden_layers)
    target.expected_length = length
    with target.active(), drafter.active(state):
        verifier = drafter.make_verifier([], 1)
        while state.unfinished:
            speculative_step(target, drafter, verifier, state)
        graphs: Any = getattr(getattr(drafter, "_runner", None), "_graphs", None)
        head = None if graphs is None else (graphs.replays, graphs.captures, graphs.refusal)
        pool = target.rows.pool
        memory = pool.nbytes(), pool.growths, pool.retries
        return Call(target.graph_counts, head, state.tokens, memory)


def test_a_family_reads_the_state_before_the_norm() -> None:
    assert BEFORE_NORM in eagle("eagle3", 3, 1, 0)().hidden_layers


@pytest.mark.by_default(name=("falcon", "eagle"))
@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_are_captured_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    head = family.make()
    with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
        model = on_gpu(llama())
        drafter = family.draft(on_gpu(head), model)
        first, again = decode(model, drafter), decode(model, drafter)
    assert first.tokens == again.tokens
    assert (first.head is not None) == family.captures
    for before, after in ((first.target, again.target), (first.head, again.head)):
        if before is not None and after is not None:
            replays, captures, refusal = before
            assert refusal is None
            assert captures > 0
            assert after[0] > replays
            assert after[1:] == (0, None)


def test_length_policies_learn_the_times_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up steps and captures, which take many more launches, are not learned."""
    timed: list[tuple[float | None, set[float]]] = []

    def note(self: RoundTimes, nodes: float, seconds: float | None, drafts: Any) -> None:
        timed.append((seconds, {used[2] / used[0] for used in drafts.values() if used[0]}))

    monkeypatch.setattr(cost_model_drafter, "PLAIN_STEPS", 2)
    monkeypatch.setattr(RoundTimes, "learn", note)
    config = DraftConfig(max_draft_tokens=3)
    with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
        gpu.launch_seconds = LAUNCH
        model, draft = on_gpu(llama()), on_gpu(tiny_models.draft_model("llama"))
        inner: Any = make_drafter(config, model, draft)
        drafter = adapt_length(inner, model, config, 1)
        replays, captures, refusal = decode(model, drafter).target
    assert (replays > 0, captures > 1, refusal) == (True, True, None)
    assert timed[0] == (None, set()), "before the first capture"
    targets = {seconds for seconds, _ in timed if seconds is not None}
    drafts = {seconds for _, draft_seconds in timed for seconds in draft_seconds}
    # A graph and operations around it; an uncaptured pass has more than a hundred launches.
    assert len(targets) == len(drafts) == 1
    assert max(targets) < 10 * LAUNCH
    assert max(drafts) < 20 * LAUNCH


@pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.24"),
    reason="transformers itself asks the device which frequencies apply",
)
def test_frequencies_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
        model, drafter = on_gpu(longrope()), LookupDrafter(LookupConfig())
        first, again = decode(model, drafter), decode(model, drafter)
    assert first.target[1] > 0
    assert again.target[1:] == (0, None)


class TestMemory:
    """A pool with initial room for 16 of 33 tokens."""

    ROOM = 16

    @pytest.fixture
    def expected(self, monkeypatch: pytest.MonkeyPatch) -> Call:
        with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
            whole = decode(on_gpu(llama()), LookupDrafter(LookupConfig()))
        graph_store.forget()
        monkeypatch.setattr(kv_pool, "MAX_RESERVED", self.ROOM)
        return whole

    def test_the_pool_grows_with_use(self, expected: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
            grown = decode(on_gpu(llama()), LookupDrafter(LookupConfig()))
        assert grown.tokens == expected.tokens
        assert grown.target[1] > expected.target[1], "captured again at the new addresses"
        assert expected.memory[1:] == (0, 0)
        assert grown.memory[1] > 0
        assert grown.memory[2] == 0
        # Extra room: a draft, and at most 16 tokens.
        assert 0 < grown.memory[0] < expected.memory[0]

    def test_a_full_device(self, expected: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        """Growing fails once, and is retried after graphs of other models are freed."""
        make, failures = kv_pool.KVPool._new, []

        def limited(pool: Any, like: Tensor, capacity: int) -> Tensor:
            if capacity > self.ROOM and not failures:
                failures.append(capacity)
                raise torch.OutOfMemoryError("no room")
            return make(pool, like, capacity)

        monkeypatch.setattr(kv_pool.KVPool, "_new", limited)
        other = torch.nn.Linear(1, 1)
        graph_store.put(other, graph_store.StoredGraphs("a", None, 1, ({}, {}), {}, None))
        with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
            call = decode(on_gpu(llama()), LookupDrafter(LookupConfig()))
        assert call.tokens == expected.tokens
        assert call.memory[2] == 1
        assert other not in graph_store._stored


def uncompiled(model: Any) -> None:
    """Leave a model as it is."""


def compiled(model: Any) -> None:
    def never(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled code ran")

    model.compile(backend=never)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=never)


def in_four_bits(model: Any, kind: str = "nf4", nested: bool = False) -> None:
    """Replace linear layers by 4-bit bitsandbytes layers, whose states are on the device."""
    import bitsandbytes as bnb

    for name, linear in list(model.model.named_modules()):
        if not isinstance(linear, torch.nn.Linear):
            continue
        rows, columns = linear.weight.shape
        layer = bnb.nn.Linear4bit(columns, rows, bias=False, quant_type=kind)
        layer.compute_type_is_set = True
        packed, state = bnb.functional.quantize_4bit(
            linear.weight.held, quant_type=kind, compress_statistics=nested
        )
        for part in filter(None, (state, state.state2)):
            moved = {n: OnGpu(t) for n, t in vars(part).items() if isinstance(t, Tensor)}
            vars(part).update(moved)
        weight: Any = OnGpu(packed)
        weight.quant_state, weight.bnb_quantized = state, True
        layer._parameters["weight"], layer.quant_state = weight, state
        model.model.set_submodule(name, layer)


def in_nested_four_bits(model: Any) -> None:
    """Quantize the scales of blocks, too."""
    in_four_bits(model, "fp4", nested=True)


def in_eight_bits(model: Any, block_size: tuple[int, int] | None = (16, 16)) -> None:
    """Replace linear layers by FP8 layers; their kernel is a package of the Hub."""
    from transformers.integrations import finegrained_fp8

    scheme = "static" if block_size is None else "dynamic"
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            rows, columns = linear.weight.shape
            layer = finegrained_fp8.FP8Linear(columns, rows, block_size, scheme)
            layer._parameters["weight"] = OnGpu(linear.weight.held.to(torch.float8_e4m3fn))
            parts = () if block_size is None else (-(-rows // 16), -(-columns // 16))
            layer._parameters["weight_scale_inv"] = OnGpu(torch.ones(parts))
            if block_size is None:
                layer._parameters["activation_scale"] = OnGpu(torch.ones(()))
            model.model.set_submodule(name, layer)


def in_eight_bits_per_tensor(model: Any) -> None:
    """Replace linear layers by FP8 layers that quantize inputs with a scale of the checkpoint."""
    in_eight_bits(model, None)


class EightBitWeight(OnGpu):
    """Weight that computes like the float8 weights of torchao, which are tensor subclasses."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        states, weight, *bias = args
        # Dynamic scales of the inputs; their maximum is not read on the host.
        scale = states.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        rounded = (states / scale).to(torch.float8_e4m3fn).to(states.dtype) * scale
        return func(rounded, OnGpu(weight.held.to(states.dtype)), *bias)


def in_weights_of_torchao(model: Any) -> None:
    """Replace the weights of linear layers by float8 weights."""
    for linear in model.model.modules():
        if isinstance(linear, torch.nn.Linear):
            rounded = EightBitWeight(linear.weight.held.to(torch.float8_e4m3fn))  # type: ignore[attr-defined]
            linear._parameters["weight"] = rounded  # type: ignore[assignment]


def dequantized_matmul(states: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return torch.nn.functional.linear(states, weight.to(states.dtype))


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        uncompiled,
        compiled,
        in_four_bits,
        in_nested_four_bits,
        in_eight_bits,
        in_eight_bits_per_tensor,
        in_weights_of_torchao,
    ],
)
def test_compiled_and_quantized_targets(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such targets are captured, and a replay computes the same as their forward pass."""
    if change in (in_four_bits, in_nested_four_bits):
        pytest.importorskip("bitsandbytes")
    if change in (in_eight_bits, in_eight_bits_per_tensor):
        from transformers.integrations import finegrained_fp8

        monkeypatch.setattr(finegrained_fp8, "fp8_linear", dequantized_matmul)
    outputs = []
    with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
        model = on_gpu(llama())
        change(model)
        for mode in ("off", "auto", "auto"):
            with cuda_graphs(mode):
                outputs.append(decode(model, LookupDrafter(LookupConfig())))
    eager, first, again = outputs
    assert eager.target[2] == "set_cuda_graphs('off')"
    assert first.target[1] > 0
    assert first.target[2] is None
    assert again.target[1:] == (0, None)
    assert eager.tokens == first.tokens == again.tokens


@pytest.mark.full
def test_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of the experts' inputs are read on the host except by `batched_mm`, which is named."""
    name, calls, histc = "qwen3_moe", {}, torch.histc
    # On the CPU it takes floats only, and transformers passes integers to other devices.
    monkeypatch.setattr(torch, "histc", lambda ids, **bins: histc(ids.float(), **bins))
    with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
        for kind in ("eager", "grouped_mm", "batched_mm"):
            model = on_gpu(tiny_models.build(name))
            model.set_experts_implementation(kind)
            calls[kind] = decode(model, LookupDrafter(LookupConfig()))
    for kind, operation in (("eager", "nonzero"), ("grouped_mm", "_grouped_mm")):
        assert calls[kind].target == (
            0,
            0,
            f"{operation} makes the host wait for the meta, in Qwen3MoeExperts; "
            "load the model with experts_implementation='batched_mm'",
        )
        assert calls[kind].tokens == calls["batched_mm"].tokens
    assert calls["batched_mm"].target[1:] == (1, None)
