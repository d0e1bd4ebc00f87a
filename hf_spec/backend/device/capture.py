"""Capture of CUDA graphs, on one stream per device, and the setting that enables it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hf_spec.backend.device import graph_store
from hf_spec.common.errors import OptionError

MODES = ("auto", "off")

_lock = threading.Lock()


@dataclass
class Switch:
    """Settings of generations that start from now on.

    Attributes:
        mode: one of `MODES`.
        always_padded: True to pad steps as for graphs on every device, for tests without a GPU.
    """

    mode: str = "auto"
    always_padded: bool = False


switch = Switch()


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
    """Capture the launches of the block on `device`; none of them runs.

    Args:
        device: device of all launches.
        memory: memory pool of the graph, from `torch.cuda.graph_pool_handle()`.

    Yields:
        The graph, complete after the block.
    """
    graph = torch.cuda.CUDAGraph()
    # Autocast caches casts of the current weights and frees them at its end; a graph must cast in
    # every replay, and its casts must not be read outside of it.
    torch.clear_autocast_cache()
    with _lock, _current_stream(device):
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


@contextmanager
def _current_stream(device: torch.device) -> Iterator[None]:
    """Restore the current stream, which PyTorch does not do after a failed capture."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream()):
        yield
