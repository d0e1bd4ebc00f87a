"""Move accepted keys and values together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.kv_keep.reference import Moves, kv_keep_ref


def kv_keep(buffers: Sequence[Tensor], moves: Moves, impl: str = "auto") -> None:
    """Copy keys and values to other entries of their slots, in place, in every buffer.

    Sources and targets may overlap: a move is read completely before it is written.

    Args:
        buffers: keys and values of all layers, (S, H, C, D) each; H and D may differ. Changed.
        moves: applied to every buffer.
        impl: see the package.
    """
    if not buffers:
        return
    if not serves(buffers[0], impl):
        kv_keep_ref(buffers, moves)
        return
    from hf_spec_kernels.kv_keep import kernel

    with torch.cuda.device_of(buffers[0]):
        kernel.kv_keep(buffers, moves)
