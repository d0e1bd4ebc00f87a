"""Compacting rows of the KV cache: overlapping moves, every layer, nothing else changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hf_spec_kernels import Moves, kv_keep, launches
from torch import Tensor

# Slot, first target index, source indices.
Move = tuple[int, int, list[int]]
MOVES: dict[str, list[Move]] = {
    "gaps": [(0, 3, [4, 6, 9])],
    "one": [(2, 0, [15])],
    "onto itself": [(1, 2, [2, 3])],
    "backwards": [(1, 3, [5, 4, 3])],
    "a cycle": [(0, 1, [2, 3, 4, 1])],
    "several rows": [(2, 1, [2, 5]), (0, 4, [5, 6, 8, 11, 12]), (1, 7, [9])],
    "some empty": [(2, 1, []), (0, 4, [5])],
    "none": [],
}


def moves_of(moves: Sequence[Move], device: torch.device | str = "cpu") -> Moves:
    def ints(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    starts = [0]
    for _, _, sources in moves:
        starts.append(starts[-1] + len(sources))
    return Moves(
        ints([slot for slot, _, _ in moves]),
        ints([target for _, target, _ in moves]),
        ints([entry for _, _, sources in moves for entry in sources]),
        ints(starts),
        max((len(sources) for _, _, sources in moves), default=0),
    )


def pool(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", layers: int = 3
) -> list[Tensor]:
    """Return keys and values, the last layer with other heads; elements of a buffer differ."""
    buffers = []
    for layer in range(layers):
        heads, head = (1, 24) if layer == layers - 1 else (2, 8)
        for width in (head, head - 2):
            numbers = torch.arange(3 * heads * 16 * width) + layer
            buffers.append(numbers.view(3, heads, 16, width).to(dtype).to(device))
    return buffers


def moved(buffers: Sequence[Tensor], moves: Sequence[Move]) -> list[Tensor]:
    """Return the expected contents, computed from copies."""
    after = [buffer.clone() for buffer in buffers]
    for new, old in zip(after, buffers, strict=True):
        for slot, target, sources in moves:
            for step, source in enumerate(sources):
                new[slot, :, target + step] = old[slot, :, source]
    return after


@pytest.mark.parametrize("name", MOVES)
def test_the_reference(name: str) -> None:
    buffers = pool()
    expected = moved(buffers, MOVES[name])
    kv_keep(buffers, moves_of(MOVES[name]), impl="torch")
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


@pytest.mark.parametrize("name", MOVES)
def test_the_kernel(name: str, device: torch.device, dtype: torch.dtype) -> None:
    buffers = pool(dtype, device)
    expected = moved(buffers, MOVES[name])
    before = launches["kv_keep"]
    kv_keep(buffers, moves_of(MOVES[name], device), impl="triton")
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))
    # One launch for all buffers of a shape, here four shapes.
    assert launches["kv_keep"] - before == (4 if name != "none" else 0)


def test_a_move_longer_than_a_tile_is_wide(device: torch.device) -> None:
    """With many indices, a Triton program takes fewer elements of a head, so that all fit."""
    torch.manual_seed(0)
    buffers = [torch.randn(1, 1, 400, 40, device=device)]
    moves = [(0, 10, torch.randperm(300).tolist())]
    expected = moved(buffers, moves)
    kv_keep(buffers, moves_of(moves, device), impl="triton")
    assert torch.equal(buffers[0], expected[0])


def test_a_pool_that_grew_is_moved_where_it_is_now(device: torch.device) -> None:
    """Addresses are cached on the device, but never for buffers that were freed."""
    moves = MOVES["gaps"]
    for _ in range(3):
        buffers = [buffer.clone() for buffer in pool(device=device)]
        expected = moved(buffers, moves)
        kv_keep(buffers, moves_of(moves, device), impl="triton")
        assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


def test_strides_are_free(device: torch.device) -> None:
    buffers = [torch.randn(3, 16, 2, 8, device=device).transpose(1, 2) for _ in range(2)]
    expected = moved(buffers, MOVES["gaps"])
    kv_keep(buffers, moves_of(MOVES["gaps"], device), impl="triton")
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


@pytest.mark.parametrize("skipped", [1, 8])
def test_buffers_may_begin_anywhere(skipped: int, device: torch.device) -> None:
    memory = torch.randn(3 * 2 * 16 * 8 + skipped, device=device)
    buffers = [memory[skipped:].view(3, 2, 16, 8)]
    assert (buffers[0].data_ptr() % 16 == 0) == (skipped == 8)
    expected = moved(buffers, MOVES["gaps"])
    kv_keep(buffers, moves_of(MOVES["gaps"], device), impl="triton")
    assert torch.equal(buffers[0], expected[0])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"slot": torch.zeros(1).long()}, TypeError, "moves.slot is torch.int64"),
        ({"target": torch.zeros(2).int()}, ValueError, "moves.target has shape"),
        ({"max_sources": 5000}, ValueError, "a move of 5000 entries"),
        ({"buffers": [torch.zeros(1, 2, 3)]}, ValueError, r"buffers\[0\] has shape"),
        ({"buffers": [torch.zeros(1, 1, 4, 4).long()]}, TypeError, "is torch.int64"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    change: dict[str, Any], error: type[Exception], match: str, device: torch.device
) -> None:
    buffers = [buffer.to(device) for buffer in change.pop("buffers", pool())]
    fields = vars(moves_of(MOVES["gaps"], device))
    changed = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in change.items()}
    with pytest.raises(error, match=match):
        kv_keep(buffers, Moves(**fields | changed), impl="triton")
