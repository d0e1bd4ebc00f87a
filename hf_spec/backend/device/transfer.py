"""Copies between the host and a device that hold the host up as little as possible.

A copy from ordinary memory makes the host wait until the device has caught up. What goes to a
device therefore goes from pinned memory, in one block for a whole step, and nobody waits for it;
what comes back does so in one block too, which is where the host learns of the step's outcome.
PyTorch reuses pinned memory only when the device has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Devices that read pinned memory by themselves; others are sent and asked as PyTorch does it.
ASYNCHRONOUS = {"cuda"}
# Where a tensor may begin within a block, in bytes; kernels read some of them in units of 16.
ALIGNMENT = 16


class Block:
    """Uninitialised tensors that lie one after the other in one piece of memory.

    `pinned` memory of the host can be read by a device by itself.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device, pinned: bool = False):
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in like]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pinned)
        self.tensors = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(self._memory.split(sizes), like, strict=True)
        ]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of the host in; to a device in one transfer that nobody waits for."""
        if self._memory.device.type == "cpu":
            for mine, tensor in zip(self.tensors, tensors, strict=True):
                mine.copy_(tensor)
            return
        pinned = self._memory.device.type in ASYNCHRONOUS
        staged = Block(tensors, torch.device("cpu"), pinned)
        staged.fill(tensors)
        self._memory.copy_(staged._memory, non_blocking=pinned)


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on a device, in one transfer that nobody waits for."""
    if device.type == "cpu":
        return list(tensors)
    block = Block(tensors, device)
    block.fill(tensors)
    return block.tensors


def fetch(tensor: Tensor) -> list[Any]:
    """`tensor.tolist()`; waits for the device."""
    return _on_host(tensor).tolist()


def fetch_all(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """`tolist()` of each tensor of a device, in one transfer; waits for the device.

    Whole numbers must lie below 2**24, where float32 begins to lose some; token ids do.
    """
    host = _on_host(torch.cat([tensor.flatten().float() for tensor in tensors]))
    parts = zip(host.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
    return [part.view(tensor.shape).to(tensor.dtype).tolist() for part, tensor in parts]


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type not in ASYNCHRONOUS:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
