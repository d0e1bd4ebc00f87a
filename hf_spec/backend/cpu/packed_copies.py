"""Packed copies of weights, kept as long as a weight lives and stays the same.

They are a second copy of the weights in memory, so there is a bound on them. A weight that was
changed, by whatever way, is packed again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_spec.backend.cpu.packed_products import (
    EVERY_ROW,
    Packed,
    Rows,
    pack,
    pack_rounded,
    served_rows,
)
from hf_spec.common.errors import OptionError

logger = logging.getLogger(__name__)

MODES = ("auto", "on", "off")
# Share of the available memory that `auto` may fill with packed weights.
MEMORY_SHARE = 0.5
# Every so manieth word of a weight is looked at by itself; a prime, which no width shares.
SAMPLED_WORD = 97


@dataclass
class Copies:
    """The packed copies of a weight.

    Attributes:
        stamp: what the weight looked like.
        exact: with all bits of the weight.
        rounded: in bfloat16, for drafts.
        rows: the products that `exact` serves.
    """

    stamp: tuple[int, ...]
    exact: Packed | None = None
    rounded: Packed | None = None
    rows: Rows = EVERY_ROW

    @property
    def all(self) -> list[Packed]:
        """Those that there are."""
        return [copy for copy in (self.exact, self.rounded) if copy is not None]


class _PackedWeights:
    """Packed copies by weight, kept as long as the weight lives and stays the same."""

    def __init__(self) -> None:
        self.mode = "auto"
        self.entries = WeakIdKeyDictionary()

    @property
    def copies(self) -> list[Packed]:
        """All that there are."""
        # Of the dictionary inside, a list is made at once: other threads may be packing.
        return [copy for copies in list(self.entries.data.values()) for copy in copies.all]

    def clear(self) -> None:
        """Free them."""
        self.entries.clear()

    def make(self, weights: Sequence[Tensor], rounded: bool) -> None:
        """See that weights have packed copies where these can be had, rounded where that pays."""
        if self.mode == "off":
            return
        room = float("inf")
        if self.mode == "auto":
            taken = cpu_packing_bytes()
            room = (_available_bytes() + taken) * MEMORY_SHARE - taken
        for weight in weights:
            stamp, copies = _stamp(weight), self.entries.get(weight)
            if copies is None or copies.stamp != stamp:
                copies = self.entries[weight] = Copies(stamp)
            if rounded and copies.rounded is None and weight.nbytes // 2 <= room:
                copies.rounded = pack_rounded(weight)
                room -= 0 if copies.rounded is None else copies.rounded.nbytes
            if copies.exact is None and not (rounded and copies.rounded is not None):
                if weight.nbytes > room:
                    _log_once("memory is short: not every linear weight is packed for the CPU")
                elif (exact := pack(weight)) is not None:
                    copies.exact = exact
                    room -= exact.nbytes
            if not copies.all:
                del self.entries[weight]


_weights = _PackedWeights()
_lock = threading.Lock()


def set_cpu_packing(mode: str) -> None:
    """Choose whether linear layers on the CPU keep a packed second copy of their weights.

    Args:
        mode: `auto` packs what fits into half of the available memory, `on` everything, `off`
            nothing (and frees what is packed); the form that needs no copy stays in use.

    Raises:
        OptionError: if `mode` is none of these.
    """
    if mode not in MODES:
        raise OptionError(f"unknown CPU packing mode {mode!r}; choose one of {', '.join(MODES)}")
    _weights.mode = mode
    if mode == "off":
        clear_cpu_packing()


def clear_cpu_packing() -> None:
    """Free the packed weights; a generation under way keeps those it uses until it ends."""
    with _lock:
        _weights.clear()


def cpu_packing_bytes() -> int:
    """Memory in bytes that the packed weights take."""
    return sum(copy.nbytes for copy in _weights.copies)


def copies_of(weight: Tensor) -> Copies | None:
    """The copies of a weight, as it was when somebody looked at it last."""
    with _lock:
        found: Copies | None = _weights.entries.get(weight)
        return found


def make_copies(weights: Sequence[Tensor], rounded: bool) -> None:
    """Look at weights, and see that there are copies of them as they are.

    `rounded` says that these are for drafts, see `packed_products`.
    """
    with _lock:
        _weights.make(weights, rounded)
        found = [(weight, _weights.entries.get(weight)) for weight in weights]
    packed = [(weight, copies) for weight, copies in found if copies and copies.exact is not None]
    pairs = [(weight, copies.exact) for weight, copies in packed]
    for weight, copies in packed:
        copies.rows = served_rows(weight, pairs)


def _stamp(weight: Tensor) -> tuple[int, ...]:
    """Identity of a weight's contents: place, shape, version and two hashes of its bits.

    The hashes are there because writing through `.data`, as PEFT does when it merges an adapter,
    moves neither place nor version. One is of the sums of all rows, as integers and times odd
    factors, so no change of a single word goes unseen; the other is of every 97th word, which
    covers all columns and shows when they change places. Together they read the weight once.
    """
    version = 0 if weight.is_inference() else weight._version
    even = weight.shape[1] * weight.element_size() % 8 == 0 and weight.data_ptr() % 8 == 0
    words = weight.detach().view(torch.int64 if even else torch.int16)
    hashes = (_mixed(words.sum(1)), _mixed(words.view(-1)[::SAMPLED_WORD].long()))
    return (weight.data_ptr(), *weight.shape, version, *hashes)


def _mixed(words: Tensor) -> int:
    """A sum of (N,) int64 that depends on their order."""
    return int((words * _odd_factors(len(words))).sum())


@functools.cache
def _odd_factors(count: int) -> Tensor:
    """(count,) int64, odd, of all sizes, always the same."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count,), generator=generator) | 1


def _available_bytes() -> int:
    """Memory still to be had according to Linux and its control group; 0 if unknown."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, limit - used)
    return available


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)
