"""Copies between host and device with as few synchronizations as possible.

A copy from pageable memory synchronizes the host with the device. A step therefore sends all its
tensors in one buffer from pinned memory, asynchronously, and fetches all results in one transfer.
PyTorch reuses pinned memory only after the device has read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Device types that copy from pinned memory asynchronously, and on which drafts grow without the
# host, in float64. Others use plain copies, which synchronize.
ASYNCHRONOUS = {"cuda"}
# Alignment in bytes of a tensor in the buffer; kernels read some of them in units of 16.
ALIGNMENT = 16


class TensorBuffer:
    """Uninitialized tensors of given shapes in one contiguous buffer, on a device or the host.

    With `pinned`, the buffer is pinned host memory, for asynchronous copies.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device, pinned: bool = False):
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in like]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pinned)
        self.tensors = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(self._memory.split(sizes), like, strict=True)
        ]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy host tensors into the buffer; asynchronously, in one transfer, to a device."""
        if self._memory.device.type == "cpu":
            for part, tensor in zip(self.tensors, tensors, strict=True):
                part.copy_(tensor)
            return
        pinned = self._memory.device.type in ASYNCHRONOUS
        staged = TensorBuffer(tensors, torch.device("cpu"), pinned)
        staged.fill(tensors)
        self._memory.copy_(staged._memory, non_blocking=pinned)

    def copy(self, staged: TensorBuffer) -> None:
        """Copy a buffer on the host with the same tensors, which may be changed afterwards."""
        memory = staged._memory
        pinned = self._memory.device.type in ASYNCHRONOUS
        if pinned:
            memory = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True).copy_(memory)
        self._memory.copy_(memory, non_blocking=pinned)


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy the host tensors among `tensors` to a device asynchronously, in one transfer."""
    if device.type == "cpu":
        return list(tensors)
    hosted = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if not hosted:
        return [tensor.to(device) for tensor in tensors]
    buffer = TensorBuffer(hosted, device)
    buffer.fill(hosted)
    sent = iter(buffer.tensors)
    return [next(sent) if t.device.type == "cpu" else t.to(device) for t in tensors]


def fetch(tensor: Tensor) -> list[Any]:
    """Return `tensor.tolist()`; synchronizes with the device."""
    return _on_host(tensor).tolist()


def fetch_all(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return `tolist()` of each tensor of a device, in one transfer; synchronizes with the device.

    Integers must be below 2**24 to be exact in float32, as token ids are.
    """
    return fetch_packed(packed(tensors), [(t.shape, t.dtype) for t in tensors])


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors of a device as one float32 vector, for `fetch_packed`."""
    return torch.cat([tensor.flatten().float() for tensor in tensors])


def fetch_packed(
    vector: Tensor, kinds: Sequence[tuple[Sequence[int], torch.dtype]]
) -> list[list[Any]]:
    """Return `tolist()` of each of the `packed` tensors, given their shapes and dtypes.

    One transfer; synchronizes with the device.
    """
    host = _on_host(vector)
    sizes = [math.prod(shape) for shape, _ in kinds]
    parts = zip(host[: sum(sizes)].split(sizes), kinds, strict=True)
    return [part.view(*shape).to(dtype).tolist() for part, (shape, dtype) in parts]


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type not in ASYNCHRONOUS:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.get_device_module(tensor.device).current_stream(tensor.device).synchronize()
    return host
