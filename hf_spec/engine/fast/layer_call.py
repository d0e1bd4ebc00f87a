"""The program of a decoder layer with the weights of one layer, ready to be called."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from hf_spec_kernels.decoder_layer import Attention, Weight, weight_of
from torch import Tensor, nn

from hf_spec.backend.cpu.layer_source import AttentionPlan
from hf_spec.backend.cpu.layer_values import TOKENS
from hf_spec.engine.fast.layer_tracing import LayerCall, LayerProgram
from hf_spec.engine.fast.packed_linear import drafts_rounded, served_weight
from hf_spec.engine.forward.tree_attention import LayerTraits, PackedStep


class BoundProgram:
    """Runs a program as one layer of a model; threads may share it.

    Args:
        program: of the layer's kind.
        weights: the layer's parameters and buffers, as the program was traced with.
        linears: the layer's linear layers.
        attention: the layer's attention, which steps know it by.
    """

    def __init__(
        self,
        program: LayerProgram,
        weights: Mapping[str, Tensor],
        linears: Mapping[str, nn.Linear],
        attention: nn.Module,
    ):
        self._program = program
        self._attention = attention
        tensors = list(weights.values())
        self._weights = [tensor.data_ptr() for tensor in tensors]
        modules = {id(linear.weight): linear for linear in linears.values()}
        used = [tensors[plan.weight] for plan in program.source.products]
        self._products = [modules.get(id(weight), weight) for weight in used]
        # By the number of tokens, and whether weights may be rounded: what multiplies, and what is
        # multiplied with, which must not go; None where the program cannot run.
        self._tables: dict[tuple[int, bool], tuple[Any, list[Any]] | None] = {}
        self._stored: tuple[Tensor, Attention] | None = None

    def __call__(self, call: LayerCall, step: PackedStep) -> Any:
        """What the layer returns; None where others compute its products or its attention."""
        tensors, tokens, source = call.tensors, call.num_tokens, self._program.source
        key = tokens, drafts_rounded()
        if key not in self._tables:
            self._tables[key] = self._table(tokens)
        table, told = self._tables[key], None
        if table is None:
            return None
        if source.attention is not None and (told := self._told(source.attention, step)) is None:
            return None
        found = [
            tensors[0].new_empty(
                [tokens if size == TOKENS else size for size in shape], dtype=dtype
            )
            for shape, dtype in source.outputs
        ]
        self._program.run(
            _addresses([*self._weights, *(tensor.data_ptr() for tensor in tensors)]),
            _addresses([tensor.data_ptr() for tensor in found]),
            table[0],
            None if told is None else ctypes.byref(told),
            tokens,
            torch.get_num_threads(),
        )
        return self._program.result(found)

    def _table(self, tokens: int) -> tuple[Any, list[Any]] | None:
        """Return what the linear layers read, or None where not all are our kernel's."""
        served: list[Any] = []
        for product, plan in zip(self._products, self._program.source.products, strict=True):
            weight = served_weight(product, tokens * plan.rows)
            if weight is None:
                return None
            served.append(weight)
        return (Weight * len(served))(*map(weight_of, served)), served

    def _told(self, plan: AttentionPlan, step: PackedStep) -> Attention | None:
        """What attention is told in a step; None where the kernel cannot serve it."""
        module: Any = self._attention
        index = module.layer_idx
        if index in step.written:
            return None
        traits, pool = step.traits_of(module), step.pool
        if traits.storage not in pool.keys:
            if traits.storage != index:
                return None
            # The first tokens of a generation.
            pool.layer(index, *(_like(shape, plan.dtype) for shape in (plan.keys, plan.values)))
        keys = pool.keys[traits.storage]
        if keys.dtype != plan.dtype or (addresses := step.addresses) is None:
            return None
        step.written[index] = module
        if (stored := self._stored) is None or stored[0] is not keys:
            values = pool.values[traits.storage]
            stored = self._stored = keys, _attention(plan, traits, keys, values)
        # Other threads may run the layer on a pool of their own.
        told = Attention.from_buffer_copy(stored[1])
        told.layout, places = addresses
        told.places = places if traits.storage == index else None
        return told


def _attention(plan: AttentionPlan, traits: LayerTraits, keys: Tensor, values: Tensor) -> Attention:
    """All of a layer's attention that steps have in common."""
    told = Attention.of(plan.dtype)
    told.keys.point_to(keys)
    told.values.point_to(values)
    told.window, told.chunk = traits.window_of(plan.window) or 0, traits.chunk or 0
    return told


def _like(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """(1, H, 0, D): keys or values of no token."""
    heads, width = shape
    return torch.empty(1, heads, 0, width, dtype=dtype)


def _addresses(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)
