"""Ragged tree attention: the reference against the definition, the kernel against the reference."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hf_spec_kernels import Scoring, launches, ragged_tree_attention
from hf_spec_kernels.configs import trying
from hf_spec_kernels.ragged_tree_attention import pack_bits
from torch import Tensor

from tests.kernels.moved import moved
from tests.kernels.ragged_cases import ROWS, Case, Shape, make_case

# Results are averages of numbers of about 1: rounding of sums in float32, of results otherwise.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Small enough that every row has several tiles of keys, and the longest one several of queries.
TILE = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1, "min_split": 16}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "chunk": {"chunk": 4},
    "chunk of one": {"chunk": 1},
    "chunk of many": {"chunk": 24},
    "softcap": {"softcap": 1.5},
    "slopes": {"slopes": [0.5, 0.25, 0.125, 0.01]},
    "sinks": {"sinks": [0.5, -1.0, 2.0, -math.inf]},
    "everything": {
        "scale": 0.5,
        "window": 20,
        "softcap": 2.0,
        "slopes": [0.5, 0.25, 0.125, 0.01],
        "sinks": [0.5, -1.0, 2.0, 0.0],
    },
}


def scoring(name: str, device: torch.device | str = "cpu") -> Scoring:
    tensors = {"slopes", "sinks"}
    return Scoring(
        **{
            key: torch.tensor(value, device=device) if key in tensors else value
            for key, value in OPTIONS[name].items()
        }
    )


def along_paths(case: Case, how: Scoring) -> Tensor:
    """Return (T, H, Dv) float64: textbook attention of every query and head to its visible keys."""
    groups = case.query.shape[1] // case.keys.shape[1]
    out = torch.zeros(*case.query.shape[:2], case.values.shape[-1], dtype=torch.float64)
    scale = how.scale or case.query.shape[-1] ** -0.5
    starts = case.layout.query_start.tolist()
    for segment, slot in enumerate(case.layout.slot.tolist()):
        for token in range(starts[segment], starts[segment + 1]):
            entries = case.seen[token]
            for head in range(case.query.shape[1]):
                scores = case.keys[slot, head // groups, entries].double()
                scores = scores @ case.query[token, head].double() * scale
                if how.softcap:
                    scores = how.softcap * torch.tanh(scores / how.softcap)
                # Keys along a path have consecutive positions.
                distance = torch.arange(len(entries) - 1, -1, -1)
                if how.slopes is not None:
                    scores -= how.slopes[head] * distance
                if how.window:
                    scores[distance >= how.window] = -math.inf
                if how.chunk:
                    scores[distance > int(case.layout.position[token]) % how.chunk] = -math.inf
                weights = scores.exp()
                sink = 0 if how.sinks is None else how.sinks[head].double().exp()
                mixed = weights @ case.values[slot, head // groups, entries].double()
                out[token, head] = mixed / (weights.sum() + sink)
    return out


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_attends_along_paths(name: str) -> None:
    case = make_case()
    out = ragged_tree_attention(*case.tensors, scoring(name), impl="torch")
    torch.testing.assert_close(out.double(), along_paths(case, scoring(name)), atol=2e-6, rtol=0)


def compare(
    case: Case, how: Scoring, num_splits: int | None = None, small_tiles: bool = True
) -> None:
    from hf_spec_kernels.ragged_tree_attention import kernel

    before = launches["ragged_tree_attention"]
    with trying("ragged_tree_attention", TILE) if small_tiles else nullcontext():
        out = kernel.ragged_tree_attention(*case.tensors, how, num_splits)
    assert launches["ragged_tree_attention"] == before + 1
    expected = ragged_tree_attention(*case.tensors, how, impl="torch")
    assert out.dtype == case.query.dtype
    torch.testing.assert_close(out, expected, atol=TOLERANCE[out.dtype], rtol=0)


@pytest.mark.by_default(name=("plain", "window", "chunk", "softcap", "slopes", "everything"))
@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernel_agrees(name: str, device: torch.device, dtype: torch.dtype) -> None:
    compare(make_case(dtype=dtype, device=device), scoring(name, device))


@pytest.mark.parametrize(("kv_heads", "groups"), [(4, 1), (1, 4), (1, 3)])
def test_queries_share_key_heads(kv_heads: int, groups: int, device: torch.device) -> None:
    """One key head per query head, one for all, and a group size that does not fill a tile."""
    compare(make_case(shape=Shape(kv_heads, groups), device=device), Scoring())


@pytest.mark.by_default(head=lambda head: head in (48, 64, 128))
@pytest.mark.parametrize("head", [8, 16, 48, 64, 80, 96, 128, 256, 512])
def test_head_sizes(head: int, device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(ROWS[1:3], Shape(1, 2, head, head), dtype, device)
    compare(case, Scoring(), small_tiles=False)


def test_values_may_be_narrower_than_keys(device: torch.device) -> None:
    compare(make_case(shape=Shape(head=24, value_head=12), device=device), Scoring())


@pytest.mark.parametrize(
    ("num_keys", "programs", "expected"),
    [
        # Eight key heads: 16 stretches of 32 keys for one tile, 8 stretches of 64 keys for two.
        (512, 8, 16),
        (512, 16, 8),
        # At most two programs per multiprocessor.
        (8192, 8, 33),
        (8192, 16, 16),
        (8192, 264, 1),
        (8192, 1000, 1),
        # No stretch is shorter than a block, and there are at most 64.
        (40, 8, 2),
        (1, 8, 1),
        (100_000, 1, 64),
    ],
)
def test_how_many_stretches(num_keys: int, programs: int, expected: int) -> None:
    from hf_spec_kernels.ragged_tree_attention.kernel import stretches

    assert stretches(num_keys, 32, 64, programs, 132) == expected


@pytest.mark.parametrize(
    ("nodes", "groups", "kind"),
    [(4, 4, "few"), (5, 4, "some"), (1, 16, "few"), (256, 4, "some"), (257, 4, "many")],
)
def test_tiles_are_chosen_by_rows(nodes: int, groups: int, kind: str) -> None:
    from hf_spec_kernels.ragged_tree_attention.kernel import config_key

    query = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    assert config_key(query, 128, nodes * groups) == f"head128_16bit_{kind}"


@pytest.mark.parametrize("name", ["window", "chunk"])
def test_only_a_window_is_shared_out(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 37 tokens and a window of 4, keys are divided as in a short context."""
    from hf_spec_kernels.ragged_tree_attention import kernel

    asked: list[int] = []

    def stretches(num_keys: int, *sizes: int) -> int:
        asked.append(num_keys)
        return 2

    monkeypatch.setattr(kernel, "stretches", stretches)
    case = make_case(ROWS[1:2], device=device)
    compare(case, scoring(name, device))
    compare(case, Scoring())
    assert asked == [4 + 10, 47]


@pytest.mark.by_default(num_splits=lambda num_splits: num_splits == 2)
@pytest.mark.parametrize("num_splits", [2, 5])
def test_stretches_of_keys_add_up(
    num_splits: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Short rows leave most stretches empty, and windows leave all but the last empty."""
    case = make_case(ROWS[1:], Shape(1, 3), dtype, device)
    how = scoring("everything", device)
    how = dataclasses.replace(how, slopes=how.slopes[:3], sinks=how.sinks[:3])
    compare(case, how, num_splits=num_splits)
    compare(case, Scoring(), num_splits=num_splits)


def test_a_prefix_may_be_told_by_bits(device: torch.device) -> None:
    case = make_case(device=device, first_known=12)
    assert case.layout.prefix.tolist() == [0, 25, 0, 0, 6]
    compare(case, scoring("window", device))
    compare(case, Scoring(), num_splits=2)


def test_many_queries_take_several_tiles(device: torch.device) -> None:
    """The prompt is causal, and all of its visible keys are given by bits."""
    prompt = (0, [-1, *range(20)])
    compare(make_case([prompt, ROWS[0]], device=device, first_known=99), Scoring())


def test_strides_are_free(device: torch.device) -> None:
    case = make_case(device=device)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = [torch.randn(*b.shape[:3], 21, device=device) for b in (case.keys, case.values)]
    for big, buffer in zip(wide, (case.keys, case.values), strict=True):
        big[..., 5:] = buffer
    case.keys, case.values = (big[..., 5:] for big in wide)
    assert not case.query.is_contiguous()
    assert not case.keys.is_contiguous()
    compare(case, Scoring())


def test_roots_alone_and_no_queries(device: torch.device) -> None:
    compare(make_case([(7, [-1]), (0, [-1]), (30, [-1])], device=device), Scoring())
    nothing = make_case([(7, []), (0, [])], device=device)
    out = ragged_tree_attention(*nothing.tensors, impl="triton")
    assert out.shape == (0, 4, 16)


def test_a_query_that_sees_nothing_gets_zeros(device: torch.device) -> None:
    case = make_case(device=device)
    case.layout.bits[1] = 0
    case.layout.prefix[0] = 0
    out = ragged_tree_attention(*case.tensors, impl="triton")
    assert not out[1].any()
    assert out[0].all()
    assert torch.equal(out[1], ragged_tree_attention(*case.tensors, impl="torch")[1])


@pytest.mark.parametrize(
    ("broken", "name", "num_splits"),
    [(math.nan, "plain", 2), (math.nan, "window", 1), (math.inf, "everything", 2)],
)
def test_what_is_not_finite_reaches_nobody_who_does_not_see_it(
    broken: float, name: str, num_splits: int, device: torch.device
) -> None:
    """In row 1, index 41 is node 4, a leaf. Windows exclude the other index, in the same tile."""
    from hf_spec_kernels.ragged_tree_attention import kernel

    case, how = make_case(device=device), scoring(name, device)
    whole = ragged_tree_attention(*case.tensors, how, impl="torch")
    for entry in {41} if how.window is None else {37 - how.window, 41}:
        # One number of one head in the slot of row 1.
        case.values[4, 0, entry, 5] = broken
        case.keys[4, 1, entry, 5] = math.nan
    with trying("ragged_tree_attention", TILE):
        outputs = [kernel.ragged_tree_attention(*case.tensors, how, num_splits)]
    outputs.append(ragged_tree_attention(*case.tensors, how, impl="torch"))
    for out in outputs:
        torch.testing.assert_close(out, outputs[-1], atol=5e-6, rtol=0, equal_nan=True)
        bad = out.isnan().flatten(1).any(dim=1)
        assert bad.nonzero().flatten().tolist() == [3 + 4], "which sees itself"
        assert out[7].isnan().all()
        torch.testing.assert_close(out[~bad], whole[~bad], atol=5e-6, rtol=0)


@pytest.mark.by_default(committed=(29,))
@pytest.mark.parametrize("committed", range(24, 33))
def test_bits_begin_anywhere_in_a_block(
    committed: int, device: torch.device, dtype: torch.dtype
) -> None:
    """The bits of a tree of 21 nodes fill two blocks of keys at every offset."""
    parents = [-1, *((node - 1) // 2 for node in range(1, 21))]
    case = make_case([(committed, parents)], dtype=dtype, device=device)
    compare(case, Scoring())
    compare(case, Scoring(), num_splits=3)


def test_one_bit_more_changes_one_query(device: torch.device, dtype: torch.dtype) -> None:
    """One more bit lets node 2 of row 1 attend to its sibling, node 1."""
    case = make_case(dtype=dtype, device=device)
    before = ragged_tree_attention(*case.tensors, impl="triton")
    case.layout.bits[3 + 2, 0] |= 2
    after = ragged_tree_attention(*case.tensors, impl="triton")
    changed = (before != after).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [5]


def test_bits_are_packed_from_the_lowest() -> None:
    visible = torch.zeros(2, 11, dtype=torch.bool)
    visible[0, 0] = visible[0, 9] = visible[1, 7] = True
    assert pack_bits(visible).tolist() == [[1, 2], [128, 0]]
    assert pack_bits(visible[:, :0]).shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": torch.randn(20, 4, 16).double()}, TypeError, "query is torch.float64"),
        ({"query": torch.randn(20, 3, 16)}, ValueError, "3 query heads cannot share 2"),
        ({"query": torch.randn(20, 4, 8)}, ValueError, r"keys has shape .*expected \(any, any"),
        ({"query": torch.randn(20, 4, 32)[..., ::2]}, ValueError, "last dimension must be contig"),
        ({"query": torch.randn(19, 4, 16)}, ValueError, "layout.position has shape"),
        ({"keys": torch.randn(6, 2, 50, 16).half()}, TypeError, "keys is torch.float16"),
        ({"values": torch.randn(6, 2, 49, 16)}, ValueError, "values has shape"),
        ({"values": torch.randn(6, 2, 50, 16, device="meta")}, ValueError, "values is on meta"),
        ({"slot": torch.zeros(5).long()}, TypeError, "layout.slot is torch.int64"),
        ({"prefix": torch.zeros(4).int()}, ValueError, "layout.prefix has shape"),
        ({"window": 0}, ValueError, "scoring.window=0"),
        ({"chunk": 0}, ValueError, "scoring.chunk=0"),
        ({"window": 2, "chunk": 2}, ValueError, "scoring.window=2 beside chunk=2"),
        ({"softcap": -1.0}, ValueError, "scoring.softcap=-1.0"),
        ({"sinks": torch.zeros(3)}, ValueError, "scoring.sinks has shape"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    change: dict[str, Any], error: type[Exception], match: str, device: torch.device
) -> None:
    case = make_case(device=device)
    there = {
        key: moved(value, device) if isinstance(value, Tensor) and not value.is_meta else value
        for key, value in change.items()
    }
    in_layout = {key: value for key, value in there.items() if hasattr(case.layout, key)}
    in_scoring = {key: value for key, value in there.items() if hasattr(Scoring(), key)}
    layout = dataclasses.replace(case.layout, **in_layout)
    tensors = [there.get(name, getattr(case, name)) for name in ("query", "keys", "values")]
    with pytest.raises(error, match=match):
        ragged_tree_attention(*tensors, layout, Scoring(**in_scoring), impl="triton")


def test_too_large_heads_are_refused(device: torch.device) -> None:
    case = make_case([(3, [-1])], Shape(1, 1, 16, 520), device=device)
    with pytest.raises(ValueError, match="head sizes 16 and 520"):
        ragged_tree_attention(*case.tensors, impl="triton")
