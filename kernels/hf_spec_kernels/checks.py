"""What launchers refuse before a kernel reads memory that is not there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Refuse a tensor that a kernel would misread: its last dimension must have stride 1, too.

    In `shape`, None stands for any size. Another dtype is a TypeError, all else a ValueError.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} is {tensor.dtype}, it must be {names}")
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({wanted})")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other arguments on {device}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last dimension must be contiguous: call "
            ".contiguous() on it"
        )
