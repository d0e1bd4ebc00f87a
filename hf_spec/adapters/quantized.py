"""Quantized storage of an adapter's matrices: 8 or 4 bits on disk, floats in memory.

Groups of 64 consecutive values share a scale: their largest magnitude over the largest integer. A
matrix `name` is stored as `name.int8` in its own shape, or as `name.int4` with half as many
columns, two values per byte, the first in the lower half. `name.scales` has the scales in float16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_spec.common.errors import AssistantError

GROUP = 64
# Names that safetensors gives the dtypes of quantized matrices.
DTYPE_NAMES = {"I8", "U8"}
SCALES = ".scales"
_ENDINGS = {8: ".int8", 4: ".int4"}
BITS = (16, *_ENDINGS)


def quantize(tensors: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Return the tensors with matrices in `bits` bits; other shapes stay as they are."""
    if bits not in _ENDINGS:
        return dict(tensors)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        divides = tensor.numel() % GROUP == 0 and tensor.shape[-1:].numel() % 2 == 0
        if tensor.ndim < 2 or not tensor.is_floating_point() or not divides:
            stored[name] = tensor
            continue
        largest = 2 ** (bits - 1) - 1
        groups = tensor.float().reshape(-1, GROUP)
        # A smaller scale would be zero in float16.
        scales = (groups.abs().amax(dim=1) / largest).clamp_min(2.0**-24).half()
        whole = (groups / scales.float()[:, None]).round().clamp(-largest, largest)
        whole = whole.to(torch.int8).reshape(tensor.shape)
        if bits == 4:
            # Values of -7 to 7 are stored as 1 to 15.
            low, high = (whole + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
            whole = low | high << 4
        stored[name + _ENDINGS[bits]] = whole
        stored[name + SCALES] = scales
    return stored


def dequantize(tensors: Mapping[str, Tensor], source: object) -> tuple[dict[str, Tensor], int]:
    """Return the tensors with quantized matrices in float32, and the least number of bits.

    Scales that are missing or do not fit raise `AssistantError`, which names `source`.
    """
    plain = dict(tensors)
    least = BITS[0]
    for name, stored in tensors.items():
        if stored.dtype not in (torch.int8, torch.uint8):
            continue
        bits = 8 if stored.dtype == torch.int8 else 4
        original, scales = name.removesuffix(_ENDINGS[bits]), None
        if original != name and original not in tensors:
            scales = plain.pop(original + SCALES, None)
        whole = stored
        if bits == 4:
            halves = torch.stack([stored & 15, stored >> 4], dim=-1)
            whole = halves.flatten(-2).to(torch.int8) - 8
        if (
            scales is None
            or scales.dtype != torch.float16
            or whole.numel() % GROUP
            or scales.shape != (whole.numel() // GROUP,)
        ):
            raise AssistantError(f"{source}: {name!r} has no scales that fit")
        groups = whole.reshape(-1, GROUP).float() * scales.float()[:, None]
        del plain[name]
        plain[original] = groups.reshape(whole.shape)
        least = min(least, bits)
    return plain, least
