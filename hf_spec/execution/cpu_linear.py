"""Products of few rows on a CPU, computed with weights packed for it.

A decoding step multiplies 1 to 64 rows by every weight of the model, where `F.linear` is slow.
With weights that were packed once (see `packed_products`) the same product takes a half to a third
of the time:

    form                 products of         takes
    packed weight        any rows            a second copy of the weights in memory
    the same, bfloat16   any rows            half of that; for drafts alone
    the same, padded     1 to 3 rows         where four rows take less time than one
    (weight @ x.T).T     4 to 48 rows        nothing; float32 only
    F.linear             the rest            nothing

All add up the same products, in different order. Left alone: classes other than `nn.Linear`
(quantised layers), dtypes other than float32 and bfloat16, modules with a forward of their own
(accelerate), autograd, autocast; and whatever runs outside of `fast_products`, in other threads or
in between, to the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hf_spec_kernels.packed_linear import PackedWeight
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from hf_spec.errors import OptionError
from hf_spec.execution.own_forwards import OwnForwards
from hf_spec.execution.packed_products import (
    EVERY_ROW,
    Packed,
    Rows,
    pack,
    pack_rounded,
    packed_product,
    padded_product,
    rounded_rows,
    rounding_pays,
    served_rows,
)

logger = logging.getLogger(__name__)

MODES = ("auto", "on", "off")
# Share of the available memory that `auto` may fill with packed weights.
MEMORY_SHARE = 0.5
# With fewer elements the packed call costs more than it saves (measured, break-even at 256 x 256).
MIN_WEIGHT_ELEMENTS = 1 << 16
# Rows for which (weight @ x.T).T was no slower than F.linear on either of two machines measured.
TRANSPOSED_ROWS = range(4, 49)
# Every so manieth word of a weight is looked at by itself; a prime, which no width shares.
SAMPLED_WORD = 97


@dataclass
class _Copies:
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
                copies = self.entries[weight] = _Copies(stamp)
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


class _Chosen(threading.local):
    """Whether this thread runs a forward that wants its products fast, and need not be exact."""

    fast: bool = False
    rounded: bool = False


_chosen = _Chosen()
# Of modules inside a `fast_cpu_linears` block.
_forwards = OwnForwards()


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


@contextlib.contextmanager
def fast_cpu_linears(model: nn.Module, rounded: bool = False) -> Iterator[None]:
    """Make `model` ready for products on the CPU in their fastest form, inside `fast_products`.

    Suitable modules get a `forward` of their own, which goes when the last block that uses the
    module ends. Packed weights stay for the next call. Entry reads every weight once, to pack those
    again that changed in between by whatever way; this takes less than one decoding step. Weights
    must not change inside the block.

    Args:
        model: any module; parts on other devices are left alone.
        rounded: whether it drafts, with weights that may be rounded to bfloat16. What somebody else
            computes with the same modules stays exact.
    """
    modules = [] if torch.is_autocast_enabled("cpu") else list(model.modules())
    _make_copies([one for one in modules if type(one) is nn.Linear], rounded)
    with _forwards.lent(modules, _fast_forwards):
        yield


@contextlib.contextmanager
def fast_products(rounded: bool = False) -> Iterator[None]:
    """What this thread runs of models made ready computes its products in their fastest form.

    With `rounded`, of weights that were rounded for it.
    """
    before, _chosen.fast, _chosen.rounded = (_chosen.fast, _chosen.rounded), True, rounded
    try:
        yield
    finally:
        _chosen.fast, _chosen.rounded = before


def has_fast_forward(module: nn.Module) -> bool:
    """Whether a module has a forward from here, and none of its own or of somebody else."""
    return _forwards.has(module)


def _make_copies(linears: list[nn.Linear], rounded: bool) -> None:
    """See that weights of modules that have or will have a fast forward are packed."""
    with _lock:
        weights = [one.weight for one in linears if _lacks_copies(one, rounded)]
        _weights.make(weights, rounded)
        found = [(weight, _weights.entries.get(weight)) for weight in weights]
    packed = [(weight, copies) for weight, copies in found if copies and copies.exact is not None]
    pairs = [(weight, copies.exact) for weight, copies in packed]
    for weight, copies in packed:
        copies.rows = served_rows(weight, pairs)


def _lacks_copies(linear: nn.Linear, rounded: bool) -> bool:
    """Whether the weight has to be looked at: those of modules in use are as they were."""
    if not has_fast_forward(linear):
        return _is_suitable(linear)
    if (copies := _weights.entries.get(linear.weight)) is None:
        return False
    if rounded and rounding_pays(linear.weight):
        return copies.rounded is None
    return copies.exact is None


def _fast_forwards(modules: list[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """The forwards of those modules that have a faster one."""
    linears = [one for one in modules if type(one) is nn.Linear and _is_suitable(one)]
    with _lock:
        packed = [_weights.entries.get(linear.weight) for linear in linears]
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for linear, copies in zip(linears, packed, strict=True):
        if copies is not None:
            plain = partial(F.linear, weight=linear.weight, bias=linear.bias)
            forwards[linear] = _PackedForward(linear, copies, linear.bias, plain)
        elif linear.weight.dtype == torch.float32:
            forwards[linear] = _transposed_forward(linear)
    return forwards


def _is_suitable(module: nn.Linear) -> bool:
    if "forward" in module.__dict__:
        return False
    # Pruning and the like recompute the weight, which is then no parameter; torchao subclasses it.
    weight, bias = module._parameters.get("weight"), module.bias
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_contiguous()
        and weight.numel() >= MIN_WEIGHT_ELEMENTS
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype == weight.dtype))
    )


def drafts_rounded() -> bool:
    """Whether what this thread runs may read weights that were rounded for drafts."""
    return _chosen.rounded


def served_weight(product: nn.Linear | Tensor, rows: int) -> PackedWeight | Tensor | None:
    """What our kernel reads for this thread's product of so many rows with a layer, or a weight.

    Small weights are as they are; None where the kernel has nothing to read, or many rows are
    faster otherwise. A single product of one row may be, too; several with what lies in between are
    not.
    """
    if isinstance(product, nn.Linear) and has_fast_forward(product):
        forward = product.__dict__["forward"]
        packed = forward.packed(rows, least=1) if isinstance(forward, _PackedForward) else None
        return packed if isinstance(packed, PackedWeight) else None
    weight = product if isinstance(product, Tensor) else product.weight
    return weight if weight.numel() < MIN_WEIGHT_ELEMENTS and weight.is_contiguous() else None


class _PackedForward:
    """The forward of a linear layer with packed copies; the plain one for other input."""

    def __init__(
        self,
        module: nn.Linear,
        copies: _Copies,
        bias: Tensor | None,
        plain: Callable[[Tensor], Tensor],
    ):
        self._copies = copies
        self._bias = bias
        self._plain = plain
        self._dtype, self._width = module.weight.dtype, module.in_features

    def packed(self, rows: int, least: int | None = None) -> Packed | None:
        """The copy that serves this thread's products of so many rows; None if none does.

        `least` rows are given where fewer than those measured are served, too.
        """
        copies = self._copies
        exact, rounded = copies.exact, copies.rounded if _chosen.rounded else None
        if rounded is not None and (exact is None or rows <= rounded_rows()):
            return rounded
        if least is None:
            least = max(copies.rows.least, copies.rows.padded)
        return exact if least <= rows <= copies.rows.most else None

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear has
        """The product."""
        width = self._width
        other = input.dtype != self._dtype or input.shape[-1] != width
        if other or not _chosen.fast or _is_left_alone():
            return self._plain(input)
        rows = input.numel() // width
        if (packed := self.packed(rows)) is not None:
            return packed_product(input, packed, self._bias)
        exact, padded = self._copies.exact, self._copies.rows.padded
        if exact is None or not self._copies.rows.least <= rows < padded:
            return self._plain(input)
        # In a step the rows are one axis: views take as long as other small operations.
        lines = input if input.shape[-2:-1] == (rows,) else input.reshape(rows, width)
        output = padded_product(lines, exact, self._bias, padded)
        return output if lines is input else output.view(*input.shape[:-1], -1)


def _transposed_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias, width = module.weight, module.bias, module.in_features

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear has
        rows = input.numel() // width
        if (
            not _chosen.fast
            or rows not in TRANSPOSED_ROWS
            or input.dtype != torch.float32
            or input.shape[-1] != width
            or _is_left_alone()
        ):
            return F.linear(input, weight, bias)
        # Contiguous, since models call `view` on what a linear layer returns.
        output = (weight @ input.reshape(rows, width).T).T.contiguous()
        if bias is not None:
            output += bias
        return output.view(*input.shape[:-1], -1)

    return forward


def _is_left_alone() -> bool:
    """Whether a product is one of autograd, or of autocast, which may begin inside a forward."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")


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
