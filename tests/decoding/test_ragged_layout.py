"""What the kernels read of a packed step is what its segments say."""

from __future__ import annotations

import pytest
import torch
from hf_spec_kernels import RaggedLayout
from torch import Tensor

from hf_spec.decoding.attention import PackedStep, Segment
from hf_spec.decoding.kv_cache import KVPool
from hf_spec.decoding.packing import RowWork, pack
from hf_spec.decoding.ragged_layout import ragged_layout, write_places
from hf_spec.decoding.tree import DraftTree

CPU = torch.device("cpu")
TREE = [
    ([8, 20, 21, 22, 23, 24], [-1, 0, 0, 1, 2, 4]),
    ([], []),
    ([42, 50, 51], [-1, 0, 0]),
]


def work() -> list[RowWork]:
    """A row with pending tokens, and one that runs its last level alone."""
    return [
        RowWork(0, 11, [5, 6, 7], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], 6),
        RowWork(2, 4, [], [7, 8], [1, 2], 3),
    ]


def seen(layout: RaggedLayout, segment: int) -> Tensor:
    """(queries, keys) bool, unpacked by hand."""
    first, end = layout.query_start[segment : segment + 2].tolist()
    num_keys, prefix = int(layout.num_keys[segment]), int(layout.prefix[segment])
    lines = torch.zeros(end - first, num_keys, dtype=torch.bool)
    lines[:, :prefix] = True
    for line, token in enumerate(range(first, end)):
        for place in range(prefix, num_keys):
            byte = int(layout.bits[token, (place - prefix) // 8])
            lines[line, place] = bool(byte >> (place - prefix) % 8 & 1)
    return lines


def check(segments: list[Segment]) -> RaggedLayout:
    layout = ragged_layout(segments, CPU)
    for index, segment in enumerate(segments):
        visible = segment.visible
        if visible is None:
            visible = torch.ones(segment.end - segment.start, segment.num_keys, dtype=torch.bool)
        assert torch.equal(seen(layout, index), visible)
        start = int(layout.key_start[index])
        positions = layout.key_position[start : start + segment.num_keys]
        assert positions.tolist() == segment.key_position.tolist()
        assert layout.position[segment.start : segment.end].tolist() == segment.position.tolist()
    assert layout.slot.tolist() == [segment.slot for segment in segments]
    assert layout.query_start.tolist() == [0, *(segment.end for segment in segments)]
    return layout


def test_packed_rows() -> None:
    inputs = pack(work(), DraftTree.from_rows(TREE))
    layout = check(inputs.segments)
    # Pending tokens, then the tree behind them; every node sees the root, so no bit is spent on it.
    assert layout.slot.tolist() == [0, 0, 2]
    assert layout.num_keys.tolist() == [14, 20, 7]
    assert layout.prefix.tolist() == [12, 15, 5]
    assert layout.bits.shape == (11, 1)
    assert layout.max_queries == 6
    assert layout.max_keys == 20


def test_a_prefix_is_no_more_than_a_help() -> None:
    segments = pack(work(), DraftTree.from_rows(TREE)).segments
    for segment in segments:
        segment.prefix = 0
    assert check(segments).bits.shape == (11, 3)


def test_where_everything_is_seen_no_bits_are_needed() -> None:
    inputs = pack([RowWork(2, 4, [], [6], [0], 1)], DraftTree.from_rows(TREE))
    layout = check(inputs.segments)
    assert layout.bits.shape == (1, 0)
    assert layout.prefix.tolist() == [5]


def test_places() -> None:
    tree = DraftTree.from_rows(TREE)
    level = [RowWork(2, 4, [], [6, 8], [0, 2], 3)]
    inputs = pack([*work()[:1], *level], tree)
    assert isinstance(inputs.writes[1][3], Tensor)
    places = write_places(inputs.writes, len(inputs.tokens) + 1, CPU)
    assert places.dtype == torch.int32
    assert places.tolist() == [[0] * 9 + [2, 2, -1], [*range(11, 20), 4, 6, -1]]


def test_a_step_makes_its_layout_once() -> None:
    inputs = pack(work(), DraftTree.from_rows(TREE))
    step = PackedStep(KVPool(3), inputs.writes, inputs.segments)
    layout, places = step.layout(CPU)
    assert places.tolist() == write_places(inputs.writes, 11, CPU).tolist()
    again = step.layout(CPU)
    assert again[0] is layout
    assert again[1] is places


@pytest.mark.gpu
def test_it_goes_to_the_device_asked_for() -> None:
    device = torch.device("cuda", 0)
    inputs = pack(work(), DraftTree.from_rows(TREE, device=device))
    layout = ragged_layout(inputs.segments, device)
    on_host = ragged_layout(pack(work(), DraftTree.from_rows(TREE)).segments, CPU)
    for name, value in vars(on_host).items():
        if isinstance(value, Tensor):
            assert getattr(layout, name).device == device
            assert getattr(layout, name).tolist() == value.tolist()
    assert write_places(inputs.writes, 11, device).device == device
