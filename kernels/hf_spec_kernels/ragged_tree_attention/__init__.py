"""Attention of packed token trees on a pool of keys and values."""

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
    """Return what `ragged_tree_attention` runs for such tensors: "triton", "cpp" or "torch"."""
    if impl == "auto" and max(query.shape[-1], values.shape[-1]) > MAX_HEAD_SIZE:
        return "torch"
    selected = dispatch.implementation(query, impl, cpu.SOURCE)
    # Under autocast the dtype of states may differ from that of their buffers.
    mixed = impl == "auto" and selected == "cpp" and values.dtype != query.dtype
    return "torch" if mixed else selected


def ragged_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    scoring: Scoring | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute attention of every packed query on the visible entries of its slot.

    Args:
        query: (T, H, D) float32, float16 or bfloat16; with last stride 1.
        keys: (S, H_kv, C, D), S slots of C entries; H is a multiple of H_kv.
        values: (S, H_kv, C, Dv). Keys and values of the queries themselves must have been written.
        layout: slot and visible entries of each query.
        scoring: scale, window, cap, biases and sinks; plain by default.
        impl: see the package.

    Returns:
        (T, H, Dv) in the dtype of `query`, with float32 sums. Queries without visible entries get
        zeros; Inf or NaN in visible keys or values give NaN for that query only.
    """
    scoring = scoring or Scoring()
    chosen = implementation(query, values, impl)
    if chosen == "torch":
        return ragged_tree_attention_ref(query, keys, values, layout, scoring)
    if chosen == "cpp":
        return cpu.ragged_tree_attention(query, keys, values, layout, scoring)
    from hf_spec_kernels.ragged_tree_attention import kernel

    # Triton launches on the current device, which may differ from the layer's.
    with torch.cuda.device_of(query):
        return kernel.ragged_tree_attention(query, keys, values, layout, scoring)
