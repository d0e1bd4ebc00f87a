"""Matrices of an adapter in 8 or 4 bits on disk; in memory they are floats as ever.

64 numbers that follow one another share a scale, their largest magnitude over the largest integer.
A matrix `name` is stored as `name.int8` in its own shape, or as `name.int4` with half as many
columns, two numbers a byte, the first in the lower half; beside it `name.scales` in half precision.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_spec.common.errors import AssistantError

GROUP = 64
# As safetensors calls what the numbers are stored in.
KINDS = {"I8", "U8"}
SCALES = ".scales"
_ENDINGS = {8: ".int8", 4: ".int4"}
BITS = (16, *_ENDINGS)


def packed(tensors: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Tensors with their matrices in so many bits; those that do not divide stay as they are."""
    if bits not in _ENDINGS:
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        divides = tensor.numel() % GROUP == 0 and tensor.shape[-1:].numel() % 2 == 0
        if tensor.ndim < 2 or not tensor.is_floating_point() or not divides:
            found[name] = tensor
            continue
        largest = 2 ** (bits - 1) - 1
        groups = tensor.float().reshape(-1, GROUP)
        # Not zero in half precision.
        scales = (groups.abs().amax(dim=1) / largest).clamp_min(2.0**-24).half()
        whole = (groups / scales.float()[:, None]).round().clamp(-largest, largest)
        whole = whole.to(torch.int8).reshape(tensor.shape)
        found[name + _ENDINGS[bits]] = whole if bits == 8 else _halves(whole)
        found[name + SCALES] = scales
    return found


def unpacked(tensors: Mapping[str, Tensor], where: object) -> tuple[dict[str, Tensor], int]:
    """What `packed` made them of, matrices in float32, and in how many bits these were stored.

    What does not belong together is an `AssistantError` that names `where` it lies.
    """
    found = dict(tensors)
    least = BITS[0]
    for name, stored in tensors.items():
        if stored.dtype not in (torch.int8, torch.uint8):
            continue
        bits = 8 if stored.dtype == torch.int8 else 4
        plain, scales = name.removesuffix(_ENDINGS[bits]), None
        if plain != name and plain not in tensors:
            scales = found.pop(plain + SCALES, None)
        whole = stored if bits == 8 else _joined(stored)
        if (
            scales is None
            or scales.dtype != torch.float16
            or whole.numel() % GROUP
            or scales.shape != (whole.numel() // GROUP,)
        ):
            raise AssistantError(f"{where}: {name!r} lacks what it is multiplied with")
        groups = whole.reshape(-1, GROUP).float() * scales.float()[:, None]
        del found[name]
        found[plain] = groups.reshape(whole.shape)
        least = min(least, bits)
    return found, least


def _halves(whole: Tensor) -> Tensor:
    """Two numbers a byte, as 1 to 15."""
    low, high = (whole + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def _joined(halves: Tensor) -> Tensor:
    return torch.stack([halves & 15, halves >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
