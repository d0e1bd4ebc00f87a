"""Selection of an op's implementation, checks of its tensors, and launch counts."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from hf_spec_kernels.build import BuildError, load

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Dtypes of C++ kernels, and the suffixes of their functions.
CPU_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Older GPUs lack bfloat16 and have too little shared memory for heads of size 256.
MIN_CAPABILITY = (8, 0)

# Op name -> launches of its main kernel in this process, for tests.
launches: Counter[str] = Counter()

_preferred = "auto"


@cache
def has_triton() -> bool:
    """Return True if Triton is installed, without importing it."""
    return find_spec("triton") is not None


@contextmanager
def using(impl: str) -> Iterator[None]:
    """Let "auto" select `impl` inside the block, for tests and comparisons."""
    global _preferred  # noqa: PLW0603 - one switch of the process, restored below
    _check(impl)
    before, _preferred = _preferred, impl
    try:
        yield
    finally:
        _preferred = before


def serves(tensor: Tensor, impl: str = "auto") -> bool:
    """Return True if an op called with `impl` on such a tensor runs its Triton kernel.

    The kernels support float32, float16 and bfloat16 on GPUs of compute capability 8.0 and above.

    Raises:
        ValueError: for an unknown `impl`, or `impl="triton"` where Triton cannot run.
    """
    _check(impl)
    if impl == "auto":
        impl = _preferred
    if impl == "auto":
        known = tensor.is_cuda and has_triton() and tensor.dtype in DTYPES
        return known and capability(tensor.device) >= MIN_CAPABILITY
    if impl == "torch":
        return False
    if not has_triton():
        raise ValueError("impl='triton' needs Triton: pip install triton, or use impl='torch'")
    if not (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            f"impl='triton' on a tensor on {tensor.device}: move it to a GPU, use impl='torch', or "
            "start Python with TRITON_INTERPRET=1"
        )
    if tensor.is_cuda and (version := capability(tensor.device)) < MIN_CAPABILITY:
        has, needs = (".".join(map(str, numbers)) for numbers in (version, MIN_CAPABILITY))
        raise ValueError(
            f"impl='triton' on {tensor.device}, a GPU of compute capability {has}: the kernels "
            f"need {needs}; use impl='torch'"
        )
    return True


def implementation(tensor: Tensor, impl: str, source: Path) -> str:
    """Return the implementation of an op that also has C++: "triton", "cpp" or "torch".

    "auto" selects C++ for float32 and bfloat16 on a CPU, outside of autograd, if it can be built.

    Raises:
        ValueError: see `serves`; also for `impl="cpp"` where C++ cannot run.
    """
    if impl == "cpp":
        if tensor.device.type != "cpu" or tensor.dtype not in CPU_DTYPES:
            raise ValueError(
                f"impl='cpp' on a {tensor.dtype} tensor on {tensor.device}: it takes "
                f"{' and '.join(map(str, CPU_DTYPES))} on the CPU; use impl='torch'"
            )
        if (obstacle := _obstacle(source)) is not None:
            raise ValueError(f"impl='cpp' cannot run here: {obstacle}; use impl='torch'")
        return "cpp"
    _check(impl, (*IMPLEMENTATIONS, "cpp"))
    if serves(tensor, impl):
        return "triton"
    auto = impl == _preferred == "auto" and not (tensor.requires_grad and torch.is_grad_enabled())
    known = auto and tensor.device.type == "cpu" and tensor.dtype in CPU_DTYPES
    return "cpp" if known and _obstacle(source) is None else "torch"


@cache
def _obstacle(source: Path) -> str | None:
    try:
        load(source)
    except BuildError as error:
        logger.info("%s runs in PyTorch on the CPU: %s", source.parent.name, error)
        return str(error)
    return None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; AMD GPUs that Triton supports have larger numbers."""
    return torch.cuda.get_device_capability(device)


def _check(impl: str, choices: Sequence[str] = IMPLEMENTATIONS) -> None:
    if impl not in choices:
        raise ValueError(f"impl={impl!r}; choose {', '.join(choices)}")


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Check an argument before a kernel reads it; its last dimension must have stride 1, too.

    Sizes of None in `shape` allow any; `device` is that of the other arguments.

    Raises:
        TypeError: for another dtype.
        ValueError: for another shape, device or stride.
    """
    # Called many times per step, so the success path is short.
    dtype, sizes = tensor.dtype, tensor.shape
    if dtype != dtypes and (isinstance(dtypes, torch.dtype) or dtype not in dtypes):
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} is {dtype}, it must be {names}")
    fits = len(sizes) == len(shape)
    for want, have in zip(shape, sizes, strict=False):
        if want != have and want is not None:
            fits = False
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(sizes)}, expected ({wanted})")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other arguments on {device}")
    if sizes and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last dimension must be contiguous: call "
            ".contiguous() on it"
        )
