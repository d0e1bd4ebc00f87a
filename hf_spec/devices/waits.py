"""Operations that make the host wait for a device, and running without them.

Such an operation cannot be part of a CUDA graph. PyTorch's own debug mode for them holds for all
threads of the process; this one holds for what runs inside the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They hand a value, or a size, to the host; `torch.multinomial` reads a value of its own.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
READS |= {"multinomial"}


class WaitError(RuntimeError):
    """The host would have had to wait for the device."""


class NoWaits(TorchDispatchMode):
    """Raises a `WaitError` in place of what would ask `device` for a value."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or name in {"_to_copy", "index", "index_put_"}:
            self._look_at(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look_at(self, name: str, args: Any, kwargs: Any) -> None:
        there = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if not any(t.device.type == self._device for t in there):
            return
        waits = name in READS
        if name == "_to_copy":
            target = torch.device(kwargs.get("device") or self._device)
            waits = target.type != self._device
        elif name.startswith("index"):
            indices = [index for index in args[1] if index is not None]
            waits = any(index.dtype in {torch.bool, torch.uint8} for index in indices)
        if waits:
            raise WaitError(f"{name} makes the host wait for the {self._device}")
