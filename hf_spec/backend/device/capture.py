"""Capture of CUDA graphs: one stream per device, operations that prevent it, and its setting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_spec.backend.device import graph_store
from hf_spec.common.errors import OptionError

MODES = ("auto", "off")
# They return a value or a size to the host, or read one internally.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
READS |= {"multinomial", "bincount", "grouped_mm_fallback"}
# They read sizes on the host, depending on their arguments.
SIZES = {"repeat_interleave", "_grouped_mm"}
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put_"}
MASKS = {torch.bool, torch.uint8}
WATCHED = READS | SIZES | COPIES | INDEXING
# Matrix multiplications of experts that transformers selects by 'grouped_mm'.
GROUPED_MM = {"_grouped_mm", "grouped_mm_fallback"}
# Compute capabilities for which PyTorch has a bfloat16 kernel of `torch._grouped_mm`.
GROUPED_MM_CAPABILITIES = (9, 10)

_lock = threading.Lock()


@dataclass
class Switch:
    """Settings of generations that start from now on."""

    mode: str = "auto"
    # Pad steps as for graphs on every device, for tests without a GPU.
    always_padded: bool = False


switch = Switch()


@dataclass
class WarmUps:
    """Number of steps so far, in this process, that were captured or ran for a later capture.

    Such steps take many times as long as replays, so rounds with any of them are not measured.
    """

    count: int = 0


warm_ups = WarmUps()


def set_cuda_graphs(mode: str) -> None:
    """Set whether decoding steps on a GPU are captured as CUDA graphs.

    Args:
        mode: `auto` captures wherever possible, `off` never. Running generations are unaffected.
            Either frees the graphs of earlier calls and forgets failed captures.

    Raises:
        OptionError: if `mode` is none of these.
    """
    switch.mode = _checked(mode)
    graph_store.forget()


@contextmanager
def cuda_graphs(mode: str) -> Iterator[None]:
    """Set the mode for generations that start inside the block; stored graphs are kept."""
    before, switch.mode = switch.mode, _checked(mode)
    try:
        yield
    finally:
        switch.mode = before


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise OptionError(f"unknown CUDA graph mode {mode!r}; choose one of {', '.join(MODES)}")
    return mode


@contextmanager
def padded_steps() -> Iterator[None]:
    """Pad the steps of generations that start inside the block as for graphs."""
    before, switch.always_padded = switch.always_padded, True
    try:
        yield
    finally:
        switch.always_padded = before


@contextmanager
def recording(device: torch.device, memory: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the launches of the block, all on `device`; none of them runs.

    The graph that is yielded is complete after the block. Its memory pool `memory` comes from
    `torch.cuda.graph_pool_handle()`.
    """
    graph = torch.cuda.CUDAGraph()
    # Autocast caches casts of the current weights and frees them at its end; a graph must cast in
    # every replay, and its casts must not be read outside of it.
    torch.clear_autocast_cache()
    # PyTorch does not restore the current stream after a failed capture.
    with _lock, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream()):
        # Other threads may use the device meanwhile.
        launches = torch.cuda.graph(
            graph, pool=memory, stream=capture_stream(device), capture_error_mode="thread_local"
        )
        with launches:
            yield graph
    torch.clear_autocast_cache()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of `device` on which graphs are captured.

    PyTorch's default stream belongs to the device of the first capture; launches on another device
    would run immediately and leave an empty graph.
    """
    return torch.cuda.Stream(device)


class WaitError(RuntimeError):
    """An operation would have synchronized the host with the device.

    Attributes:
        operation: its name, without the overload.
    """

    def __init__(self, operation: str, device: str):
        super().__init__(f"{operation} makes the host wait for the {device}")
        self.operation = operation


def grouped_mm_waits(states: Tensor) -> bool:
    """Return True if PyTorch reads the sizes of the groups on the host to multiply `states`.

    As of PyTorch 2.13 it has one kernel for all groups in bfloat16 on some devices; elsewhere it
    copies the offsets to the host and multiplies group by group (GroupedBlas.cpp).
    """
    if states.device.type != "cuda" or states.dtype != torch.bfloat16:
        return True
    return torch.cuda.get_device_capability(states.device)[0] not in GROUPED_MM_CAPABILITIES


class NoWaits(TorchDispatchMode):
    """Raises `WaitError` instead of running an operation that synchronizes with `device`.

    Such an operation cannot be captured. PyTorch's debug mode for them applies to all threads of
    the process; this applies to the code inside its block.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in WATCHED and self._waits(name, args, kwargs):
            raise WaitError(name, self._device)
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
            masks = any(index.dtype in MASKS for index in args[1] if index is not None)
            # Indices and values of another device are copied to it first.
            return masks or not all(there)
        if name == "repeat_interleave":
            # Its last tensor has the repeats, unless they are a number.
            repeats = args[1] if len(args) > 1 else args[0]
            return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
        if name == "_grouped_mm":
            # Without offsets all groups have the same size.
            return len(args) > 2 and args[2] is not None and grouped_mm_waits(args[0])
        return True
