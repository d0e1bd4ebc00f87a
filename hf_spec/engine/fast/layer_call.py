"""A layer compiled to C++ and bound to the weights of one decoder layer, ready to be called."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from hf_spec_kernels.decoder_layer import Attention, Weight, weight_of
from torch import Tensor, nn

from hf_spec.backend.cpu.layer_source import AttentionPlan
from hf_spec.backend.cpu.layer_text import TOKENS
from hf_spec.engine.fast.layer_tracing import LayerCall, LayerFunction, addresses_of
from hf_spec.engine.fast.packed_linear import is_quantized, kernel_weight, mode
from hf_spec.engine.forward.step import LayerTraits, PackedStep


class _Table(NamedTuple):
    """Weights of the linear layers, and shapes and dtypes of results, for a number of tokens."""

    weights: ctypes.Array[Weight]
    outputs: list[tuple[torch.Size, torch.dtype]]
    # Objects that `weights` points to.
    alive: list[Any]


class BoundLayer:
    """Runs a compiled layer with the weights of one decoder layer; threads may share it.

    The `weights` are the layer's parameters and buffers, in the order in which it was traced. Its
    `attention` registers with every step.
    """

    def __init__(
        self,
        function: LayerFunction,
        weights: Mapping[str, Tensor],
        layer: nn.Module,
        attention: nn.Module,
    ):
        self._function = function
        self._attention = attention
        tensors = list(weights.values())
        self._constants = addresses_of(tensors)
        linears: list[Any] = [
            part for part in layer.modules() if type(part) is nn.Linear or is_quantized(part)
        ]
        modules = {id(linear.weight): linear for linear in linears}
        used = [tensors[plan.weight] for plan in function.source.linears]
        self._linears = [modules.get(id(weight), weight) for weight in used]
        # By (number of tokens, whether weights may be rounded, whether it is a prompt); None where
        # other kernels are used.
        self._tables: dict[tuple[int, bool, bool], _Table | None] = {}
        # KV buffer of keys that the layer ran on last, and its attention there.
        self._attended: tuple[Tensor, Attention] | None = None

    def __call__(self, call: LayerCall, step: PackedStep) -> Any:
        """Return the layer's result; None where other kernels run its GEMMs or its attention."""
        key, function = (call.num_tokens, mode.rounded, mode.prompt), self._function
        if key not in self._tables:
            self._tables[key] = self._make_table(call.num_tokens)
        table, attention, plan = self._tables[key], None, function.source.attention
        if table is None:
            return None
        if plan is not None and (attention := self._register(plan, step)) is None:
            return None
        states = call.tensors[0]
        results = [states.new_empty(shape, dtype=dtype) for shape, dtype in table.outputs]
        arguments = call.arguments(None if attention is None else step, results)
        pointer = None if attention is None else ctypes.byref(attention)
        function.run(self._constants, table.weights, pointer, arguments)
        return function.form.filled(results)

    def _make_table(self, tokens: int) -> _Table | None:
        source = self._function.source
        weights = []
        for linear, plan in zip(self._linears, source.linears, strict=True):
            weight = kernel_weight(linear, tokens * plan.rows, plan.dtype)
            if weight is None:
                # Our kernel does not run them all.
                return None
            weights.append(weight)
        outputs = [
            (torch.Size(tokens if size == TOKENS else size for size in shape), dtype)
            for shape, dtype in source.outputs
        ]
        array = (Weight * len(weights))(*map(weight_of, weights))
        return _Table(array, outputs, weights)

    def _register(self, plan: AttentionPlan, step: PackedStep) -> Attention | None:
        """Register with a step; return the attention, or None where the kernel does not run."""
        module: Any = self._attention
        index = module.layer_idx
        if index in step.written:
            return None
        traits, pool = step.traits_of(module), step.pool
        if traits.storage not in pool.keys:
            if traits.storage != index:
                return None
            # The first tokens of a generation.
            shapes = [(1, heads, 0, width) for heads, width in (plan.keys, plan.values)]
            pool.layer(index, *(torch.empty(shape, dtype=plan.dtype) for shape in shapes))
        keys = pool.keys[traits.storage]
        if keys.dtype != plan.dtype or step.addresses is None:
            return None
        step.written[index] = module
        attended = self._attended
        if attended is None or attended[0] is not keys:
            # Replaced as a whole: other threads may run the layer on a pool of their own.
            attention = _attention(plan, traits, keys, pool.values[traits.storage])
            if traits.storage != index:
                attention.write = None
            attended = self._attended = keys, attention
        return attended[1]


def _attention(plan: AttentionPlan, traits: LayerTraits, keys: Tensor, values: Tensor) -> Attention:
    attention = Attention.of(plan.dtype)
    attention.keys.point_to(keys)
    attention.values.point_to(values)
    attention.window, attention.chunk = traits.window_of(plan.window) or 0, traits.chunk or 0
    return attention
