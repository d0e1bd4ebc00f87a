"""GEMMs with packed weights on a CPU: the available forms, and when each is fastest.

There are two forms. Our kernel (`hf_spec_kernels.packed_linear`) reads the weight sequentially, at
memory bandwidth, which bounds GEMMs of few rows; it needs a C++ compiler. oneDNN's form needs two
private operators of PyTorch. Each is checked on a sample, and measurements on this machine select a
form per dtype, and per weight shape the numbers of rows for which `F.linear` is slower.

The forms add in different order. In bfloat16 that changes tokens, so there our kernel runs all
GEMMs if it can be built. Drafts need not be exact: for them there are weights in bfloat16.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from hf_spec_kernels.packed_linear import PackedWeight, pack_weight, packed_linear
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

# Packing for 16 rows is as fast for 1 to 300 rows as packing for that number (measured).
PACKED_ROWS = 16
NO_LIMIT = 1 << 62
# Dtypes in which a row's result must not depend on the number of rows: sums in different order
# often round differently, and greedy output would depend on the strategy.
SAME_BITS = {torch.bfloat16}
# In oneDNN one row may take longer than four, so fewer rows are padded to this number.
PADDED_ROWS = 4
# Bytes of weights that forms are timed on: larger than any cache, as in a model.
TIMED_BYTES = 64 << 20
# Numbers of rows at which forms are compared.
TIMED_ROWS = (1, 8)
# Required speedup of another form over our kernel. Only layers that run our kernel can be compiled,
# and operations other than GEMMs take about a third of the GEMMs' time.
HEAD_START = 1.2

Packed: TypeAlias = PackedWeight | Tensor
Gemm: TypeAlias = Callable[..., Tensor]


class Form(NamedTuple):
    """A packing of weights, and the GEMM that reads it."""

    name: str
    pack: Callable[[Tensor], Packed]
    gemm: Gemm


class Rows(NamedTuple):
    """Numbers of rows for which packed weights are used, bounds included."""

    least: int
    most: int
    # Fewer rows are padded to this number.
    padded: int = 1


EVERY_ROW = Rows(1, NO_LIMIT)


def _onednn_gemm(states: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    run = torch.ops.mkldnn._linear_pointwise.default
    output: Tensor = run(states, packed, bias, "none", [], "")
    return output


OWN = Form("our kernel", pack_weight, packed_linear)
ROUNDED = Form(
    "our kernel, weights in bfloat16", lambda w: pack_weight(w.bfloat16(), w.dtype), packed_linear
)
ONEDNN = Form(
    "oneDNN", lambda w: torch.ops.mkldnn._reorder_linear_weight(w, PACKED_ROWS), _onednn_gemm
)
FORMS = (OWN, ONEDNN)


@torch.no_grad()
def pack(weight: Tensor) -> Packed | None:
    """Pack an (N, K) weight for `gemm`; return None if no form is available."""
    form = form_of(weight.dtype)
    return None if form is None else form.pack(weight.detach())


@torch.no_grad()
def pack_rounded(weight: Tensor) -> Packed | None:
    """Pack an (N, K) weight in bfloat16; return None if that is not faster than `pack`."""
    faster = weight.dtype == torch.float32 and rounded_rows() > 0
    return ROUNDED.pack(weight.detach()) if faster else None


@functools.cache
def rounded_rows() -> int:
    """Return the most rows for which bfloat16 weights speed up float32 GEMMs here; 0 for none."""
    exact = form_of(torch.float32)
    if exact is None or obstacle(OWN, torch.float32) is not None:
        return 0
    few, many = max(TIMED_ROWS), 64
    if _fastest_form((exact, ROUNDED), torch.float32, TIMED_ROWS) is exact:
        return 0
    return NO_LIMIT if _fastest_form((exact, ROUNDED), torch.float32, (many,)) is ROUNDED else few


def gemm(states: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` with a packed weight."""
    if isinstance(packed, PackedWeight):
        return packed_linear(states, packed, bias)
    return _onednn_gemm(states, packed, bias)


def padded_gemm(
    states: Tensor, packed: Packed, bias: Tensor | None = None, rows: int = PADDED_ROWS
) -> Tensor:
    """Compute `gemm` of (..., R, D) states, padded to `rows` rows."""
    *axes, count, _ = states.shape
    # Expanding one row is faster than padding with zeros.
    zeros = (0, 0, 0, rows - count)
    more = states.expand(*axes, rows, -1) if count == 1 else F.pad(states, zeros)
    return gemm(more, packed, bias).narrow(-2, 0, count)


@functools.cache
def form_of(dtype: torch.dtype) -> Form | None:
    """Return the form for a dtype; None if none is available.

    In bfloat16 it is our kernel if that can be built, otherwise the form that is fastest here.
    """
    obstacles = {form: obstacle(form, dtype) for form in FORMS}
    usable = [form for form, reason in obstacles.items() if reason is None]
    level = logging.INFO if usable else logging.WARNING
    for form, reason in obstacles.items():
        if reason is not None:
            message = "linear layers in %s are not packed for the CPU by %s: %s"
            logger.log(level, message, dtype, form.name, reason)
    exact = dtype in SAME_BITS and OWN in usable
    if len(usable) > 1 and not exact:
        return _fastest_form(usable, dtype, TIMED_ROWS, HEAD_START)
    return OWN if exact else next(iter(usable), None)


def obstacle(form: Form, dtype: torch.dtype) -> str | None:
    """Return why a form cannot be used; None if it agrees with `F.linear` on a sample."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    sample = torch.randn(1, 5, 64, generator=generator).to(dtype)
    try:
        output = form.gemm(sample, form.pack(weight), bias)
    except (AttributeError, RuntimeError, TypeError) as error:
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
    """Return the fastest form; those after the first must be faster by the factor `head_start`."""
    size = 1024
    count = TIMED_BYTES // (size * size * dtype.itemsize)
    weights = [torch.full((size, size), 0.5, dtype=dtype) for _ in range(count)]
    timed = [(form.gemm, [form.pack(weight) for weight in weights]) for form in forms]
    seconds = [0.0] * len(forms)
    for rows in numbers_of_rows:
        states = torch.ones(rows, size, dtype=dtype)
        seconds = [sum(pair) for pair in zip(seconds, fastest_seconds(states, *timed), strict=True)]
    first, *others = seconds
    weighed = [first, *(head_start * other for other in others)]
    return forms[weighed.index(min(weighed))]


# Rows for which weights of a shape and dtype are used packed, by number of threads too; timed once
# per process.
served: dict[tuple[Hashable, ...], Rows] = {}


def packed_rows(weight: Tensor, pairs: Sequence[tuple[Tensor, Packed | None]]) -> Rows:
    """Return the numbers of rows for which weights of this shape are used packed on this machine.

    `F.linear` can be faster at 1 and 2 rows and at long prompts. Timings use the `pairs`, all
    weights of the model and their packed forms.
    """
    if weight.dtype in SAME_BITS and form_of(weight.dtype) is OWN:
        return EVERY_ROW
    key = weight.shape, weight.dtype, torch.get_num_threads()
    if key not in served:
        count = max(1, TIMED_BYTES // weight.nbytes)
        same_shape = [
            (other, packed)
            for other, packed in pairs
            if packed is not None and other.shape == weight.shape and other.dtype == weight.dtype
        ]
        served[key] = _fastest_rows(same_shape[:count])
    return served[key]


@torch.no_grad()
def _fastest_rows(pairs: Sequence[tuple[Tensor, Packed]]) -> Rows:
    """Return the rows for which packed weights are used; `F.linear` must be 10% faster."""
    weights, packed_weights = map(list, zip(*pairs, strict=True))
    dtype, width = weights[0].dtype, weights[0].shape[1]
    plain, packed = (F.linear, weights), (gemm, packed_weights)
    most = _most_rows(dtype, torch.get_num_threads())
    if not isinstance(packed_weights[0], PackedWeight):
        one = torch.ones(1, width, dtype=dtype)
        *as_they_are, by_padded = fastest_seconds(one, plain, packed, (padded_gemm, packed_weights))
        if by_padded < 0.9 * min(as_they_are):
            return Rows(1, most, PADDED_ROWS)
    few = (torch.ones(rows, width, dtype=dtype) for rows in (1, 2))
    least = next((len(states) for states in few if _packed_wins(states, plain, packed)), 3)
    return Rows(least, most)


@functools.cache
def _most_rows(dtype: torch.dtype, num_threads: int) -> int:
    weights = [torch.ones(1024, 1024, dtype=dtype) for _ in range(2)]
    copies = [pack(weight) for weight in weights]
    states = torch.ones(256, 1024, dtype=dtype)
    wins = _packed_wins(states, (F.linear, weights), (gemm, copies))
    return NO_LIMIT if wins else 64


# A function that multiplies states by a weight, and weights in its layout.
_Timed: TypeAlias = tuple[Callable[..., object], Sequence[Any]]


def _packed_wins(states: Tensor, plain: _Timed, packed: _Timed) -> bool:
    by_plain, by_packed = fastest_seconds(states, plain, packed)
    return by_packed < 1.1 * by_plain


def fastest_seconds(states: Tensor, *forms: _Timed) -> list[float]:
    """Return the minimum time of each GEMM over its weights in a few interleaved runs."""
    # Thread time excludes other processes.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least = [math.inf] * len(forms)
    for _ in range(5):
        for index, (run, weights) in enumerate(forms):
            start = clock()
            for weight in weights:
                run(states, weight)
            least[index] = min(least[index], clock() - start)
    return least
