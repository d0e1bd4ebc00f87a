"""Detection of operations that synchronize the host with a device.

Such an operation cannot be part of a CUDA graph. PyTorch's debug mode for them applies to all
threads of the process; `NoWaits` applies to the code inside its block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They return a value or a size to the host; `torch.multinomial` reads one internally.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
READS |= {"multinomial"}
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put_"}
MASKS = {torch.bool, torch.uint8}
WATCHED = READS | COPIES | INDEXING


class WaitError(RuntimeError):
    """An operation would have synchronized the host with the device."""


class NoWaits(TorchDispatchMode):
    """Raises `WaitError` instead of running an operation that synchronizes with `device`."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in WATCHED and self._waits(name, args, kwargs):
            raise WaitError(f"{name} makes the host wait for the {self._device}")
        return func(*args, **kwargs)

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
        there = [tensor.device.type == self._device for tensor in tensors]
        if name in COPIES:
            end = there[0]
            if name == "_to_copy" and (device := kwargs.get("device")) is not None:
                end = torch.device(device).type == self._device
            return end != there[-1] and not kwargs.get("non_blocking")
        if not any(there):
            return False
        if name in INDEXING:
            return any(index.dtype in MASKS for index in args[1] if index is not None)
        return True
