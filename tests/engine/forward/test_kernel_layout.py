"""Layouts of packed steps agree with their segments."""

from __future__ import annotations

from dataclasses import replace

import torch
from hf_spec_kernels import RaggedLayout
from torch import Tensor

from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kernel_layout import (
    Sizes,
    padded,
    ragged_layout,
    round_up,
    segment_slot_mapping,
    slot_mapping,
    tensors_of,
    write_padded,
)
from hf_spec.engine.forward.packing import pack
from hf_spec.engine.forward.row_batch import RowWork

TREE = [
    ([8, 20, 21, 22, 23, 24], [-1, 0, 0, 1, 2, 4]),
    ([], []),
    ([42, 50, 51], [-1, 0, 0]),
]


def work() -> list[RowWork]:
    """Return a row with pending tokens, and one that runs only its last level."""
    return [
        RowWork(0, 11, [5, 6, 7], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], 6),
        RowWork(2, 4, [], [7, 8], [1, 2], 3),
    ]


def seen(layout: RaggedLayout, segment: int) -> Tensor:
    """Return a (queries, keys) bool mask, unpacked by hand."""
    first, end = layout.query_start[segment : segment + 2].tolist()
    num_keys, prefix = int(layout.num_keys[segment]), int(layout.prefix[segment])
    lines = torch.zeros(end - first, num_keys, dtype=torch.bool)
    lines[:, :prefix] = True
    for line, token in enumerate(range(first, end)):
        for entry in range(prefix, num_keys):
            byte = int(layout.bits[token, (entry - prefix) // 8])
            lines[line, entry] = bool(byte >> (entry - prefix) % 8 & 1)
    return lines


def check(segments: list[Segment]) -> RaggedLayout:
    layout = ragged_layout(segments)
    for index, segment in enumerate(segments):
        visible = segment.visible
        if visible is None:
            visible = torch.ones(segment.end - segment.start, segment.num_keys, dtype=torch.bool)
        assert torch.equal(seen(layout, index), visible)
        start = int(layout.key_start[index])
        prefix = int(layout.prefix[index])
        told = layout.key_position[start : start + segment.num_keys - prefix].tolist()
        first = int(layout.first_position[index])
        assert [*range(first, first + prefix), *told] == segment.key_position.tolist()
        assert layout.position[segment.start : segment.end].tolist() == segment.position.tolist()
    assert layout.slot.tolist() == [segment.slot for segment in segments]
    assert layout.query_start.tolist() == [0, *(segment.end for segment in segments)]
    return layout


def test_packed_rows() -> None:
    inputs = pack(work(), DraftTree.from_rows(TREE))
    layout = check(inputs.segments)
    # Pending tokens, then the tree after them; every node sees the root, so no bit is spent on it.
    assert layout.slot.tolist() == [0, 0, 2]
    assert layout.num_keys.tolist() == [14, 20, 7]
    assert layout.prefix.tolist() == [12, 15, 5]
    assert layout.bits.shape == (11, 1)
    assert layout.max_queries == 6
    assert layout.max_keys == 20


def test_a_prefix_is_no_more_than_a_help() -> None:
    segments = pack(work(), DraftTree.from_rows(TREE)).segments
    segments = [
        replace(one, prefix=0, tail_position=one.key_position, seen=one.visible) for one in segments
    ]
    assert check(segments).bits.shape == (11, 3)


def test_where_everything_is_seen_no_bits_are_needed() -> None:
    inputs = pack([RowWork(2, 4, [], [6], [0], 1)], DraftTree.from_rows(TREE))
    layout = check(inputs.segments)
    assert layout.bits.shape == (1, 0)
    assert layout.prefix.tolist() == [5]


def test_entries() -> None:
    tree = DraftTree.from_rows(TREE)
    level = [RowWork(2, 4, [], [6, 8], [0, 2], 3)]
    inputs = pack([*work()[:1], *level], tree)
    query = RowWork(1, 5, []).query_segment(start=11, count=1)
    mapping = segment_slot_mapping([*inputs.segments, query])
    assert mapping.dtype == torch.int32
    assert mapping.tolist() == [[0] * 9 + [2, 2, -1], [*range(11, 20), 4, 6, -1]]
    runs = [(0, range(11, 20)), (2, [4, 6]), (-1, [-1])]
    assert torch.equal(slot_mapping(runs), mapping)


def test_padding_sees_what_the_last_segment_starts_with() -> None:
    segments = pack(work(), DraftTree.from_rows(TREE)).segments
    layout = ragged_layout(segments)
    sizes = Sizes.of(layout)
    assert sizes == (12, 3, 1, 6)
    sizes = sizes._replace(tokens=16, max_queries=8)
    assert sizes.hold(layout)
    wide = padded(layout, sizes, 256)
    assert wide.query_start.tolist() == [*layout.query_start.tolist()[:-1], 16]
    assert wide.position.tolist() == [*layout.position.tolist(), *[int(layout.position[-1])] * 5]
    assert wide.bits[:11].tolist() == layout.bits.tolist()
    assert not wide.bits[11:].any()
    assert (wide.max_queries, wide.max_keys) == (8, 256)
    for index in range(len(segments)):
        before, after = seen(layout, index), seen(wide, index)
        assert torch.equal(after[: len(before)], before)
    assert after[len(before) :].sum(dim=1).tolist() == [int(layout.prefix[-1])] * 5


def test_written_padding_is_that_of_a_padded_layout() -> None:
    """Padding overwrites what an earlier step left in the buffers."""
    layouts = [ragged_layout(pack(work()[:n], DraftTree.from_rows(TREE)).segments) for n in (1, 2)]
    sizes = Sizes.of(layouts[1])._replace(tokens=16, segments=4, num_bytes=2, max_queries=16)
    arrays = [
        torch.full_like(tensor, 99).numpy() for tensor in tensors_of(padded(layouts[0], sizes, 256))
    ]
    for layout in (*layouts, layouts[0]):
        write_padded(layout, arrays, sizes.tokens)
        expected = tensors_of(padded(layout, sizes, 256))
        assert [a.tolist() for a in arrays] == [tensor.tolist() for tensor in expected]


def test_steps_of_one_size_share_a_shape() -> None:
    shapes = set()
    for depth in (3, 4, 9):
        parents = [-1, *([0] * (depth - 1))]
        tree = DraftTree.from_rows([(list(range(depth)), parents)])
        every = list(range(depth))
        segments = pack([RowWork(0, 40 + depth, [], every, every, depth)], tree).segments
        wide = padded(ragged_layout(segments), Sizes(12, 1, 1, 12), 256)
        shapes.add(tuple(tuple(t.shape) for t in tensors_of(wide)))
    assert len(shapes) == 1


def test_a_shape_holds_what_can_be_padded_to_it() -> None:
    """Padding goes to the last segment, which must not get more queries than the kernel expects."""
    layout = ragged_layout(pack(work(), DraftTree.from_rows(TREE)).segments)
    sizes = Sizes.of(layout)
    assert sizes.hold(layout)
    assert not sizes._replace(tokens=8).hold(layout)
    assert not sizes._replace(segments=2).hold(layout)
    assert not sizes._replace(num_bytes=0).hold(layout)
    assert not sizes._replace(tokens=24).hold(layout), "13 more for the last row, which has 2"
    assert sizes._replace(tokens=24, max_queries=16).hold(layout)


def test_sizes() -> None:
    assert [round_up(n) for n in (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 200)] == [
        *(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 256)
    ]
