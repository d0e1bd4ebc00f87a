"""Which implementation an op runs, and how often each kernel was launched."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

IMPLEMENTATIONS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Op name -> launches of its main kernel in this process; a test of the wiring reads it.
launches: Counter[str] = Counter()

_preferred = "auto"


@cache
def has_triton() -> bool:
    """Whether Triton is installed; does not import it."""
    return find_spec("triton") is not None


@contextmanager
def using(impl: str) -> Iterator[None]:
    """Let "auto" mean `impl` inside the block, for tests and comparisons."""
    global _preferred  # noqa: PLW0603 - one switch of the process, restored below
    _check(impl)
    before, _preferred = _preferred, impl
    try:
        yield
    finally:
        _preferred = before


def serves(tensor: Tensor, impl: str = "auto") -> bool:
    """Whether an op called with `impl` on tensors like this one runs its kernel.

    Device and dtype decide; the kernels know float32, float16 and bfloat16. An unknown `impl`, or a
    kernel asked for where none can run, is a ValueError.
    """
    _check(impl)
    if impl == "auto":
        impl = _preferred
    if impl == "auto":
        return tensor.is_cuda and has_triton() and tensor.dtype in DTYPES
    if impl == "triton":
        _check_kernel_runs(tensor)
    return impl == "triton"


def _check(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}; choose {', '.join(IMPLEMENTATIONS)}")


def _check_kernel_runs(tensor: Tensor) -> None:
    if not has_triton():
        raise ValueError("impl='triton' needs Triton: pip install triton, or use impl='torch'")
    if not (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            f"impl='triton' on a tensor on {tensor.device}: move it to a GPU, use impl='torch', or "
            "start Python with TRITON_INTERPRET=1"
        )
