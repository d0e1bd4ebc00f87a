"""CUDA graphs: whether they are recorded, and how, on one stream per device."""

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
    """Settings of generations that begin now.

    Attributes:
        mode: one of `MODES`.
        always_padded: whether steps have the padded form of graphs on every device, for tests where
            nothing can be recorded.
    """

    mode: str = "auto"
    always_padded: bool = False


switch = Switch()


def set_cuda_graphs(mode: str) -> None:
    """Choose whether decoding steps on a GPU are recorded as CUDA graphs.

    Args:
        mode: `auto` records wherever it can be done, `off` nothing. A generation under way goes on
            as it began. Either gives back what earlier calls have left on the GPU, and tries again
            what could not be recorded.

    Raises:
        OptionError: if `mode` is none of these.
    """
    switch.mode = _checked(mode)
    graph_store.forget()


@contextmanager
def cuda_graphs(mode: str) -> Iterator[None]:
    """Set the mode for what begins inside the block; what earlier calls have left stays."""
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
    """Run steps that begin inside the block in the form of graphs, recorded or not."""
    before, switch.always_padded = switch.always_padded, True
    try:
        yield
    finally:
        switch.always_padded = before


@contextmanager
def recording(device: torch.device, memory: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Record what the block launches on `device`; none of it runs.

    Args:
        device: of all launches.
        memory: the pool of memory of the graph, a `torch.cuda.graph_pool_handle()`.

    Yields:
        The graph, complete after the block.
    """
    graph = torch.cuda.CUDAGraph()
    # The copies of weights that autocast keeps are of today's weights, and go when it ends: the
    # graph makes its own in every replay, and nobody else reads those.
    torch.clear_autocast_cache()
    with _lock, _current_stream(device):
        # Other threads of the process may go on using the device.
        launches = torch.cuda.graph(
            graph, pool=memory, stream=capture_stream(device), capture_error_mode="thread_local"
        )
        with launches:
            yield graph
    torch.clear_autocast_cache()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of `device` on which graphs are recorded.

    By default PyTorch records on the device that was recorded on first, and steps of a model on
    another one would run at once and leave an empty graph.
    """
    return torch.cuda.Stream(device)


@contextmanager
def _current_stream(device: torch.device) -> Iterator[None]:
    """Restore the current stream, which PyTorch does not where a recording fails."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream()):
        yield
