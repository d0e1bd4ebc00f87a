"""Attention of packed token trees against a pool of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels import dispatch
from hf_spec_kernels.ragged_tree_attention import cpu
from hf_spec_kernels.ragged_tree_attention.layout import (
    MAX_HEAD_SIZE,
    RaggedLayout,
    Scoring,
    pack_bits,
)
from hf_spec_kernels.ragged_tree_attention.reference import ragged_tree_attention_ref

__all__ = ["RaggedLayout", "Scoring", "implementation", "pack_bits", "ragged_tree_attention"]


def implementation(query: Tensor, values: Tensor, impl: str = "auto") -> str:
    """What `ragged_tree_attention` runs for such tensors: "triton", "cpp" or "torch"."""
    if impl == "auto" and max(query.shape[-1], values.shape[-1]) > MAX_HEAD_SIZE:
        return "torch"
    found = dispatch.implementation(query, impl, cpu.SOURCE)
    # Under autocast layers may hand over states of another dtype than their buffers have.
    mixed = impl == "auto" and found == "cpp" and values.dtype != query.dtype
    return "torch" if mixed else found


def ragged_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    scoring: Scoring | None = None,
    impl: str = "auto",
) -> Tensor:
    """Let every packed query attend to what it sees of its own slot.

    Args:
        query: (T, H, D) float32, float16 or bfloat16; any strides but the last, which is 1.
        keys: (S, H_kv, C, D), S slots of C places; H is a multiple of H_kv.
        values: (S, H_kv, C, Dv), which may differ from D. Keys and values of the queries
            themselves must have been written before.
        layout: which queries look at which slot and what of it they see.
        scoring: scale, window, cap, biases and sinks; plain by default.
        impl: see the package.

    Returns:
        (T, H, Dv) in the dtype of `query`, sums in float32; zeros for a query that sees nothing,
        NaN for one that sees Inf or NaN, which reach nobody else.
    """
    scoring = scoring or Scoring()
    chosen = implementation(query, values, impl)
    if chosen == "torch":
        return ragged_tree_attention_ref(query, keys, values, layout, scoring)
    if chosen == "cpp":
        return cpu.ragged_tree_attention(query, keys, values, layout, scoring)
    from hf_spec_kernels.ragged_tree_attention import launch

    # Triton launches on the current device, which need not be that of the layer.
    with torch.cuda.device_of(query):
        return launch.ragged_tree_attention(query, keys, values, layout, scoring)
