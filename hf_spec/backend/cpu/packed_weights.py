"""Packed weights, cached per weight.

They are a second copy of the weights in memory, so their total size is bounded. A weight is packed
again after any change of its contents.
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
from hf_spec_kernels.packed_linear import PackedWeight
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_spec.backend.cpu.packed_gemm import (
    EVERY_ROW,
    Packed,
    Rows,
    pack,
    pack_rounded,
    packed_rows,
)
from hf_spec.backend.cpu.screened_weight import MIN_ELEMENTS, ScreenedWeight, screen, timed
from hf_spec.common.errors import OptionError
from hf_spec.common.logging import log_once

logger = logging.getLogger(__name__)

MODES = ("auto", "on", "off")
# Fraction of the available memory that `auto` may fill with packed weights.
MEMORY_SHARE = 0.5
# Every 97th word of a weight is hashed individually; a prime, so that all columns are sampled.
SAMPLED_WORD = 97
# Passes before a weight is screened. Screening takes as long as about that many matmuls.
SCREENED_FROM = 64


@dataclass
class PackedForms:
    """Packed forms of a weight with the fingerprint `stamp`.

    `rounded` is bfloat16, for drafts; `screened` is `exact` where the best outputs alone are read.
    """

    stamp: tuple[int, ...]
    exact: Packed | None = None
    rounded: Packed | None = None
    # For which `exact` is used.
    rows: Rows = EVERY_ROW
    screened: ScreenedWeight | None = None
    # Passes in which the best outputs alone were read.
    greedy_passes: int = 0

    @property
    def all(self) -> list[Packed | ScreenedWeight]:
        """The forms that exist."""
        forms = (self.exact, self.rounded, self.screened)
        return [packed for packed in forms if packed is not None]


class _Cache:
    """Packed forms by weight, held as long as the weight lives."""

    def __init__(self) -> None:
        self.mode = "auto"
        self.forms = WeakIdKeyDictionary()
        self.lock = threading.Lock()


_cache = _Cache()


def set_cpu_packing(mode: str) -> None:
    """Set whether linear layers on the CPU use packed weights, a second copy in memory.

    Args:
        mode: `auto` packs up to half of the available memory, `on` all weights, `off` none, and
            frees packed weights. Faster methods that need no packed weights stay in use.

    Raises:
        OptionError: if `mode` is none of these.
    """
    if mode not in MODES:
        raise OptionError(f"unknown CPU packing mode {mode!r}; choose one of {', '.join(MODES)}")
    _cache.mode = mode
    if mode == "off":
        clear_cpu_packing()


def clear_cpu_packing() -> None:
    """Free the packed weights; running generations hold theirs until they end."""
    with _cache.lock:
        _cache.forms.clear()


def cpu_packing_bytes() -> int:
    """Return the memory of all packed weights in bytes."""
    # Listing the inner dictionary is atomic; other threads may be packing.
    return sum(packed.nbytes for forms in list(_cache.forms.data.values()) for packed in forms.all)


def packed_weights_of(weight: Tensor) -> PackedForms | None:
    """Return the packed forms of a weight as of the last `pack_weights`, if there are any."""
    with _cache.lock:
        forms: PackedForms | None = _cache.forms.get(weight)
        return forms


def pack_weights(weights: Sequence[Tensor], rounded: bool) -> None:
    """Pack weights that are new or have changed since they were packed; reads every weight once.

    With `rounded`, for drafts, weights are rounded to bfloat16 where that is faster.
    """
    with _cache.lock:
        if _cache.mode != "off":
            _pack(weights, rounded)
        entries = [(weight, _cache.forms.get(weight)) for weight in weights]
    packed = [(weight, forms) for weight, forms in entries if forms and forms.exact is not None]
    pairs = [(weight, forms.exact) for weight, forms in packed]
    for weight, forms in packed:
        forms.rows = packed_rows(weight, pairs)


def screened_weight_of(weight: Tensor, states: Tensor) -> ScreenedWeight | None:
    """Return the screened form of a packed weight, or None if it is not faster for (R, K) states.

    It is made and timed once, when the weight has been used often enough to pay for that.
    """
    if weight.numel() < MIN_ELEMENTS:
        return None
    with _cache.lock:
        forms: PackedForms | None = _cache.forms.get(weight)
        if forms is None or not isinstance(forms.exact, PackedWeight):
            return None
        forms.greedy_passes += 1
        if forms.greedy_passes == SCREENED_FROM and weight.numel() <= _room():
            screened = timed(screen(weight, forms.exact), states)
            forms.screened = screened if screened.most_rows else None
        found = forms.screened
    return found if found is not None and len(states) <= found.most_rows else None


def _room() -> float:
    """Return how many more bytes packed weights may take."""
    if _cache.mode != "auto":
        return float("inf")
    taken = cpu_packing_bytes()
    return (_available_bytes() + taken) * MEMORY_SHARE - taken


def _pack(weights: Sequence[Tensor], rounded: bool) -> None:
    room = _room()
    for weight in weights:
        stamp, forms = _stamp(weight), _cache.forms.get(weight)
        if forms is None or forms.stamp != stamp:
            forms = _cache.forms[weight] = PackedForms(stamp)
        if rounded and forms.rounded is None and weight.nbytes // 2 <= room:
            forms.rounded = pack_rounded(weight)
            room -= 0 if forms.rounded is None else forms.rounded.nbytes
        if forms.exact is None and not (rounded and forms.rounded is not None):
            if weight.nbytes > room:
                message = "memory is short: not every linear weight is packed for the CPU"
                log_once(logger, logging.WARNING, message)
            elif (exact := pack(weight)) is not None:
                forms.exact = exact
                room -= exact.nbytes
        if not forms.all:
            del _cache.forms[weight]


def _stamp(weight: Tensor) -> tuple[int, ...]:
    """Return a fingerprint of a weight: address, shape, version and two hashes of its bits.

    The hashes detect writes through `.data`, such as merging an adapter in PEFT, which change
    neither address nor version. One hashes the integer sums of all rows times odd factors, so it
    detects any change of a single word. The other hashes every 97th word; it covers all columns
    and detects permutations. Together they read the weight once.
    """
    even = weight.shape[1] * weight.element_size() % 8 == 0 and weight.data_ptr() % 8 == 0
    words = weight.detach().view(torch.int64 if even else torch.int16)
    hashes = (_mixed(words.sum(1)), _mixed(words.view(-1)[::SAMPLED_WORD].long()))
    return (weight.data_ptr(), *weight.shape, version_of(weight), *hashes)


def version_of(tensor: Tensor) -> int:
    """Return the counter of in-place changes; inference tensors have none, and give -1."""
    return -1 if tensor.is_inference() else tensor._version


def _mixed(words: Tensor) -> int:
    return int((words * _odd_factors(len(words))).sum())


@functools.cache
def _odd_factors(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count,), generator=generator) | 1


def _available_bytes() -> int:
    # By Linux and its control group; 0 if unknown.
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
