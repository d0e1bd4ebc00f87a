"""Products on a CPU with weights that were packed for them: forms, and where each is fast here.

Two forms know how to pack. Our own kernel (`hf_spec_kernels.packed_linear`) reads the weight from
one end to the other, as fast as memory goes, which is what few rows wait for; it needs a C++
compiler. oneDNN's needs two private operators of PyTorch. Either is tried on a sample first, and
what serves is decided by times taken on this machine: a form for each dtype, and for every shape of
weight the numbers of rows for which `F.linear` is slower.

All add up the same products, in different order. In bfloat16 that shows in the tokens. There our
kernel serves all products where it can be built: a row's result has the same bits for every number
of rows. Drafts need not be exact to the last bit: for them there is a form with weights in
bfloat16, which is less to read.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from hf_spec_kernels.packed_linear import BuildError, PackedWeight, pack_weight, packed_linear
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

# A weight packed for 16 rows serves 1 to 300 as well as one packed for that number (measured).
PACKED_ROWS = 16
NO_LIMIT = 1 << 62
# Dtypes in which a row's result must not depend on the number of rows: two sums of another order
# often round to different numbers, and greedy output would differ between strategies.
SAME_BITS = {torch.bfloat16}
# One row may take longer than so many: on an EPYC of two cores those of SmolLM2-135M took 49 ms by
# F.linear and 42 ms packed by oneDNN, four of its packed ones 35 ms.
PADDED_ROWS = 4
# Weights that forms are timed on, in bytes: more than a cache holds, as in a model.
TIMED_BYTES = 64 << 20
# Rows of a step at which the two forms are compared.
TIMED_ROWS = (1, 8)
# So many times as fast as our kernel another form must be: only layers whose products are ours run
# as one program, and what else is computed in a layer takes a third of its products' time.
HEAD_START = 1.2

Packed: TypeAlias = PackedWeight | Tensor
Product: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class Form:
    """A way to pack a weight, and the product with what came of it."""

    name: str
    pack: Callable[[Tensor], Packed]
    product: Product


class Rows(NamedTuple):
    """Which products packed weights are used for.

    Attributes:
        least, most: rows.
        padded: fewer rows than this are computed as so many.
    """

    least: int
    most: int
    padded: int = 1


EVERY_ROW = Rows(1, NO_LIMIT)


def _onednn_pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)


def _onednn_product(states: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        states, packed, bias, "none", [], ""
    )
    return output


def _pack_rounded(weight: Tensor) -> PackedWeight:
    return pack_weight(weight.bfloat16(), weight.dtype)


OWN = Form("our kernel", pack_weight, packed_linear)
ROUNDED = Form("our kernel, weights in bfloat16", _pack_rounded, packed_linear)
ONEDNN = Form("oneDNN", _onednn_pack, _onednn_product)
FORMS = (OWN, ONEDNN)


@torch.no_grad()
def pack(weight: Tensor) -> Packed | None:
    """A packed copy of an (N, K) weight for `packed_product`; None where no form serves."""
    form = form_of(weight.dtype)
    return None if form is None else form.pack(weight.detach())


@torch.no_grad()
def pack_rounded(weight: Tensor) -> Packed | None:
    """A packed copy of an (N, K) weight in bfloat16; None where that is no faster than `pack`."""
    return ROUNDED.pack(weight.detach()) if rounding_pays(weight) else None


def rounding_pays(weight: Tensor) -> bool:
    """Whether products with a copy in bfloat16 are faster than with an exact one."""
    return weight.dtype == torch.float32 and rounded_rows() > 0


@functools.cache
def rounded_rows() -> int:
    """Most rows for which weights in bfloat16 make products in float32 faster here; 0 for none."""
    exact = form_of(torch.float32)
    if exact is None or obstacle(OWN, torch.float32) is not None:
        return 0
    few, many = max(TIMED_ROWS), 64
    if _fastest_form((exact, ROUNDED), torch.float32, TIMED_ROWS) is exact:
        return 0
    return NO_LIMIT if _fastest_form((exact, ROUNDED), torch.float32, (many,)) is ROUNDED else few


def packed_product(states: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a packed weight."""
    if isinstance(packed, PackedWeight):
        return packed_linear(states, packed, bias)
    return _onednn_product(states, packed, bias)


def padded_product(
    states: Tensor, packed: Packed, bias: Tensor | None = None, rows: int = PADDED_ROWS
) -> Tensor:
    """The product of (..., R, D) states with R rows in all, computed as one of more rows."""
    *axes, count, _ = states.shape
    # Copies of one row take less time to make than zeros.
    zeros = (0, 0, 0, rows - count)
    more = states.expand(*axes, rows, -1) if count == 1 else F.pad(states, zeros)
    return packed_product(more, packed, bias).narrow(-2, 0, count)


@functools.cache
def form_of(dtype: torch.dtype) -> Form | None:
    """Return the form for a dtype, or None if there is none.

    In bfloat16 this is our kernel wherever it can be built. Otherwise the form whose decoding steps
    take least time on this machine.
    """
    obstacles = {form: obstacle(form, dtype) for form in FORMS}
    usable = [form for form, reason in obstacles.items() if reason is None]
    level = logging.INFO if usable else logging.WARNING
    for form, reason in obstacles.items():
        if reason is not None:
            said = "linear layers in %s are not packed for the CPU by %s: %s"
            logger.log(level, said, dtype, form.name, reason)
    exact = dtype in SAME_BITS and OWN in usable
    if len(usable) > 1 and not exact:
        return _fastest_form(usable, dtype, TIMED_ROWS, HEAD_START)
    return OWN if exact else next(iter(usable), None)


def obstacle(form: Form, dtype: torch.dtype) -> str | None:
    """Why a form cannot be used, or None: it agrees with F.linear on a sample."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    sample = torch.randn(1, 5, 64, generator=generator).to(dtype)
    try:
        output = form.product(sample, form.pack(weight), bias)
    except (AttributeError, BuildError, NotImplementedError, RuntimeError, TypeError) as error:
        return str(error)
    # Sums of 64 products of size 1: rounding stays well below these.
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    difference = (output - F.linear(sample, weight, bias)).abs().max().item()
    return None if difference < tolerance else f"off by {difference}"


@torch.no_grad()
def _fastest_form(
    forms: Sequence[Form],
    dtype: torch.dtype,
    numbers_of_rows: Sequence[int],
    head_start: float = 1.0,
) -> Form:
    """The form whose products take least time, on weights that no cache holds.

    Others than the first must be faster by `head_start`.
    """
    size = 1024
    weights = [
        torch.full((size, size), 0.5, dtype=dtype)
        for _ in range(TIMED_BYTES // (size * size * dtype.itemsize))
    ]
    timed = [(form.product, [form.pack(weight) for weight in weights]) for form in forms]
    seconds = [0.0] * len(forms)
    for rows in numbers_of_rows:
        states = torch.ones(rows, size, dtype=dtype)
        seconds = [sum(pair) for pair in zip(seconds, least_seconds(states, *timed), strict=True)]
    first, *others = seconds
    weighed = [first, *(head_start * other for other in others)]
    return forms[weighed.index(min(weighed))]


def timed_as(weight: Tensor) -> tuple[Hashable, ...]:
    """What the times of products with a weight depend on."""
    return weight.shape, weight.dtype, torch.get_num_threads()


# By `timed_as`: what packed copies of such weights serve, timed once per process.
served: dict[tuple[Hashable, ...], Rows] = {}


def served_rows(weight: Tensor, pairs: Sequence[tuple[Tensor, Packed | None]]) -> Rows:
    """The products for which the packed copies of weights of this shape are used on this machine.

    Where they lose at all, it is at 1 and 2 rows or at long prompts. Our kernel serves every number
    of rows in the dtypes of `SAME_BITS`.

    Args:
        weight: one of them.
        pairs: all weights of the model and their copies, on which it is timed.
    """
    if weight.dtype in SAME_BITS and form_of(weight.dtype) is OWN:
        return EVERY_ROW
    key = timed_as(weight)
    if key not in served:
        count = max(1, TIMED_BYTES // weight.nbytes)
        alike = [(one, copy) for one, copy in pairs if copy is not None and _alike(one, weight)]
        served[key] = _fastest_rows(alike[:count])
    return served[key]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


@torch.no_grad()
def _fastest_rows(pairs: Sequence[tuple[Tensor, Packed]]) -> Rows:
    """What packed copies serve; F.linear must be a tenth faster to be preferred."""
    weights, copies = map(list, zip(*pairs, strict=True))
    dtype, width = weights[0].dtype, weights[0].shape[1]
    plain, packed = (F.linear, weights), (packed_product, copies)
    most = _most_rows(dtype, torch.get_num_threads())
    if not isinstance(copies[0], PackedWeight):
        # oneDNN's own product of one row may take longer than one of several.
        one = torch.ones(1, width, dtype=dtype)
        *as_they_are, by_padded = least_seconds(one, plain, packed, (padded_product, copies))
        if by_padded < 0.9 * min(as_they_are):
            return Rows(1, most, PADDED_ROWS)
    few = (torch.ones(rows, width, dtype=dtype) for rows in (1, 2))
    least = next((len(states) for states in few if _packed_wins(states, plain, packed)), 3)
    return Rows(least, most)


@functools.cache
def _most_rows(dtype: torch.dtype, num_threads: int) -> int:
    """Most rows for which packed weights are used on this machine."""
    weights = [torch.ones(1024, 1024, dtype=dtype) for _ in range(2)]
    copies = [pack(weight) for weight in weights]
    states = torch.ones(256, 1024, dtype=dtype)
    wins = _packed_wins(states, (F.linear, weights), (packed_product, copies))
    return NO_LIMIT if wins else 64


# A product and weights in its form.
_Timed: TypeAlias = tuple[Product, Sequence[Packed | None]]


def _packed_wins(states: Tensor, plain: _Timed, packed: _Timed) -> bool:
    by_plain, by_packed = least_seconds(states, plain, packed)
    return by_packed < 1.1 * by_plain


def least_seconds(states: Tensor, *forms: _Timed) -> list[float]:
    """The fastest of a few runs of each product over its weights; they take turns."""
    # One thread's own time leaves out what other processes take from it.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least = [math.inf] * len(forms)
    for _ in range(5):
        for index, (product, weights) in enumerate(forms):
            start = clock()
            for one in weights:
                product(states, one)
            least[index] = min(least[index], clock() - start)
    return least
