"""The C++ kernel of ragged tree attention, compared with the reference."""

from __future__ import annotations

import dataclasses
import math
import platform
from typing import Any

import pytest
import torch
from hf_spec_kernels import RaggedLayout, Scoring, launches, ragged_tree_attention, using
from hf_spec_kernels.ragged_tree_attention import cpu, implementation
from torch import Tensor

from tests.compiler import built_for, needs_compiler
from tests.kernels.ragged_cases import ROWS, Case, Shape, make_case
from tests.kernels.test_ragged_tree_attention import OPTIONS, TOLERANCE, scoring

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
# Blocks have 64 keys. Rows with several and with many queries, a row whose first keys are given by
# bits, and an empty row.
CHAIN = [-1, *range(39)]
LONG: list[tuple[int, list[int]]] = [
    (150, [-1, 0, 0, 1]),
    (0, CHAIN),
    (64, [-1]),
    (200, CHAIN),
    (9, []),
    (63, [-1, 0]),
]


def compare(case: Case, how: Scoring) -> Tensor:
    before = launches["ragged_tree_attention"]
    out = ragged_tree_attention(*case.tensors, how, impl="cpp")
    assert launches["ragged_tree_attention"] == before + 1
    expected = ragged_tree_attention(*case.tensors, how, impl="torch")
    assert out.dtype == case.query.dtype
    torch.testing.assert_close(out, expected, atol=TOLERANCE[out.dtype], rtol=0)
    return out


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [ROWS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_agrees(name: str, rows: Any, dtype: torch.dtype) -> None:
    compare(make_case(rows, dtype=dtype), scoring(name))


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(4, 1), Shape(1, 4), Shape(1, 3), Shape(1, 17)),
        *(Shape(1, 2, head, head) for head in (1, 8, 24, 64, 80, 128, 256, 512)),
        *(Shape(1, 2, 24, 12), Shape(1, 2, 5, 70)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_of_heads(shape: Shape, dtype: torch.dtype) -> None:
    compare(make_case(LONG, shape, dtype), Scoring())


@pytest.mark.parametrize("window", [1, 63, 64, 65, 130])
def test_windows_leave_out_whole_blocks(window: int) -> None:
    compare(make_case(LONG), Scoring(window=window))
    compare(make_case(LONG), Scoring(chunk=window))


@pytest.mark.parametrize("first_known", [12, 999])
def test_a_prefix_may_be_told_by_bits(first_known: int) -> None:
    compare(make_case(LONG, first_known=first_known), scoring("window"))
    compare(make_case(LONG, first_known=first_known), Scoring())


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_one_result_in_every_batch(name: str, dtype: torch.dtype) -> None:
    """The result does not depend on the number of threads either."""
    case, how = make_case(LONG, dtype=dtype), scoring(name)
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(ragged_tree_attention(*case.tensors, how, impl="cpp"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    starts = case.layout.query_start.tolist()
    for segment in range(len(LONG)):
        own = slice(starts[segment], starts[segment + 1])
        layout = dataclasses.replace(
            case.layout,
            query_start=torch.tensor([0, own.stop - own.start], dtype=torch.int32),
            **{
                key: getattr(case.layout, key)[segment : segment + 1]
                for key in ("slot", "num_keys", "prefix", "first_position", "key_start")
            },
            **{key: getattr(case.layout, key)[own] for key in ("bits", "position")},
        )
        alone = case.query[own], case.keys, case.values, layout, how
        assert torch.equal(ragged_tree_attention(*alone, impl="cpp"), found[0][own])


@pytest.mark.parametrize("name", ["plain", "window", "everything"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_has_one_result_in_every_tree(name: str, groups: int, dtype: torch.dtype) -> None:
    """Each query also runs alone with its visible keys, without those of siblings between them."""
    case, how = make_case(LONG, Shape(2, groups), dtype), scoring(name)
    if how.slopes is not None:
        how = dataclasses.replace(how, slopes=torch.linspace(0.1, 0.5, 2 * groups))
    if how.sinks is not None:
        how = dataclasses.replace(how, sinks=torch.linspace(-1, 1, 2 * groups))
    found = ragged_tree_attention(*case.tensors, how, impl="cpp")
    starts, slots = case.layout.query_start.tolist(), case.layout.slot.tolist()
    for slot, start, end in zip(slots, starts, starts[1:], strict=False):
        for query in range(start, end):
            count, entries = len(case.seen[query]), case.seen[query]
            one = torch.tensor([count], dtype=torch.int32)
            none = torch.zeros(1, dtype=torch.int32)
            layout = RaggedLayout(
                slot=none,
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                num_keys=one,
                prefix=one,
                bits=torch.zeros(1, 0, dtype=torch.uint8),
                position=one - 1,
                first_position=none,
                key_position=none[:0],
                key_start=none,
                max_queries=1,
                max_keys=count,
            )
            buffers = (buffer[slot : slot + 1, :, entries] for buffer in (case.keys, case.values))
            alone = ragged_tree_attention(
                case.query[query : query + 1], *buffers, layout, how, impl="cpp"
            )
            assert torch.equal(alone[0], found[query])


def test_strides_are_free() -> None:
    case = make_case(LONG)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = [torch.randn(*b.shape[:3], 21) for b in (case.keys, case.values)]
    for big, buffer in zip(wide, (case.keys, case.values), strict=True):
        big[..., 5:] = buffer
    case.keys, case.values = (big[..., 5:] for big in wide)
    assert not case.query.is_contiguous()
    compare(case, Scoring())


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    case = make_case(LONG)
    case.layout.bits[1] = 0
    case.layout.prefix[0] = 0
    for how in (Scoring(), scoring("sinks")):
        out = compare(case, how)
        assert not out[1].any()
        assert out[0].all()
    nothing = make_case([(7, []), (0, [])])
    assert ragged_tree_attention(*nothing.tensors, impl="cpp").shape == (0, 4, 16)


@pytest.mark.parametrize("rows", [ROWS, [(0, []), (37, [*ROWS[1][1], *[0] * 20]), *ROWS[2:]]])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["plain", "window", "everything"])
def test_what_is_not_finite_reaches_nobody_who_does_not_see_it(
    name: str, broken: float, rows: Any
) -> None:
    """In row 1, index 41 is node 4, a leaf. Windows exclude the other index."""
    case, how = make_case(rows), scoring(name)
    whole = ragged_tree_attention(*case.tensors, how, impl="cpp")
    for entry in {41} if how.window is None else {37 - how.window, 41}:
        case.values[4, 0, entry, 5] = broken
        case.keys[4, 1, entry, 5] = math.nan
    out = ragged_tree_attention(*case.tensors, how, impl="cpp")
    expected = ragged_tree_attention(*case.tensors, how, impl="torch")
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=0, equal_nan=True)
    assert out.isnan().any()
    sees = torch.tensor([41 in entries for entries in case.seen])
    assert torch.equal(out[~sees], whole[~sees])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_other_processors_compute_the_same(processor: str) -> None:
    """Covers narrower registers, and processors without fused multiply-add."""
    with built_for(processor, cpu._function):
        for name in ("plain", "everything"):
            for dtype in DTYPES:
                compare(make_case(LONG, Shape(2, 2, 20, 20), dtype), scoring(name))


def test_what_it_cannot_read_is_refused() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="keys has shape"):
        ragged_tree_attention(case.query, case.keys[..., 1:], *case.tensors[2:], impl="cpp")
    with pytest.raises(ValueError, match=r"impl='cpp' on a torch\.float16 tensor on cpu: it takes"):
        ragged_tree_attention(*make_case(dtype=torch.float16).tensors, impl="cpp")
    with pytest.raises(ValueError, match="impl='fast'; choose auto, triton, torch, cpp"):
        ragged_tree_attention(*case.tensors, impl="fast")
    layout = dataclasses.replace(case.layout, slot=case.layout.slot.long())
    with pytest.raises(TypeError, match=r"layout\.slot is torch\.int64"):
        ragged_tree_attention(*case.tensors[:3], layout, impl="cpp")


def test_where_it_serves() -> None:
    query, values = torch.zeros(1, 2, 8), torch.zeros(1, 2, 4, 8)
    assert implementation(query, values) == "cpp"
    assert implementation(query.bfloat16(), values.bfloat16()) == "cpp"
    with using("torch"):
        assert implementation(query, values) == "torch"
    others = [
        (query.half(), values.half()),
        (query.double(), values.double()),
        (query.bfloat16(), values),
        (query, torch.zeros(1, 2, 4, 520)),
        (query.clone().requires_grad_(), values),
    ]
    for pair in others:
        assert implementation(*pair) == "torch"
    with torch.no_grad():
        assert implementation(*others[-1]) == "cpp"
