"""Padded baselines: gaps in the KV cache, rows padded to one length, and the same attention."""

from __future__ import annotations

from typing import Any

import torch

from hf_spec.engine.forward.packing import align_right, pack
from hf_spec.engine.forward.padded_batching import (
    BATCHING,
    PaddedStorage,
    PaddedWork,
    fill_up,
    make_storage,
    pack_padded,
)
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.row_storage import RowStorage
from tests.engine.forward.test_packing import TREE, WORK
from tests.engine.forward.test_row_batch import FORK
from tests.engine.forward.test_row_storage import PROMPTS, chains, step, storage, stored


def padded(work: RowWork, **changes: Any) -> PaddedWork:
    return PaddedWork(**vars(work) | changes)


def test_the_names_and_what_they_pad() -> None:
    found = {name: (b.pads_inputs, b.pads_kv) for name, b in BATCHING.items()}
    assert found == {
        "unpadded": (False, False),
        "unpadded_kv": (True, False),
        "unpadded_input": (False, True),
        "padded": (True, True),
    }


def test_the_default_pads_nothing() -> None:
    kinds = {name: type(make_storage(2, name)) for name in BATCHING}
    others = dict.fromkeys(["unpadded_kv", "unpadded_input", "padded"], PaddedStorage)
    assert kinds == {"unpadded": RowStorage, **others}


def test_gaps_move_places_and_leave_positions() -> None:
    work = padded(FORK, first_index=7, stored_indices=[0, 4])
    assert (work.root_position, work.root_index, work.num_keys) == (4, 9, 12)
    assert work.cache_indices == [7, 8, 9, 10, 11]
    assert work.positions(TREE) == FORK.positions(TREE)
    assert work.tokens(TREE) == FORK.tokens(TREE)
    assert work.key_positions().tolist() == [0, -1, -1, -1, 1, -1, -1, 2, 3]


def test_padding_fills_every_row_up_to_the_longest() -> None:
    root = padded(WORK[1])
    idle = PaddedWork(1, stored=6, pending=[], first_index=6)
    rows = fill_up([padded(FORK), root], [idle])
    assert [w.row for w in rows] == [0, 1, 2]
    assert [w.fill for w in rows] == [0, 5, 4]
    assert [len(w.tokens(TREE)) for w in rows] == [5, 5, 5]
    assert [len(w.positions(TREE)) for w in rows] == [5, 5, 5]
    # Copies of the root after everything that the row stores.
    assert root.tokens(TREE) == [8] * 5
    assert root.positions(TREE) == [4] * 5
    assert root.cache_indices == [4, 5, 6, 7, 8]
    assert idle.cache_indices == [6, 7, 8, 9, 10]
    assert [w.num_tokens for w in rows] == [5, 0, 1], "padding does not count"


# The same row 0 with gaps in its KV cache, and row 2 padded to four tokens.
GAPS = padded(WORK[0], first_index=6, stored_indices=[1, 4])
FILLED = padded(WORK[1], fill=3)


def test_gaps_are_hidden_in_packed_segments() -> None:
    inputs, unpadded = pack([GAPS, WORK[1]], TREE), pack(WORK, TREE)
    assert inputs.tokens == unpadded.tokens
    assert inputs.positions == unpadded.positions
    stored = [list(segment.cache_indices) for segment in inputs.segments[:2]]
    assert stored == [[6, 7, 8], [9, 10, 11]]
    chain, fork, _ = inputs.segments
    stored = [0, 1, 0, 0, 1, 0]
    assert chain.num_keys == 9
    assert chain.visible is not None
    assert chain.visible.int().tolist() == [
        [*stored, 1, 0, 0],
        [*stored, 1, 1, 0],
        [*stored, 1, 1, 1],
    ]
    assert fork.visible is not None
    assert fork.visible[:, :9].int().tolist() == [[*stored, 1, 1, 1]] * 3
    assert fork.visible[:, 9:].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert fork.key_position.tolist() == [-1, 0, -1, -1, 1, -1, 2, 3, 4, 5, 6, 6]


def test_gaps_are_hidden_in_a_rectangle() -> None:
    inputs, unpadded = (align_right([w, WORK[1]], TREE, 3, 63) for w in (GAPS, WORK[0]))
    assert torch.equal(inputs.tokens, unpadded.tokens)
    assert torch.equal(inputs.positions, unpadded.positions)
    assert inputs.cache_indices[0].tolist() == [6, 7, 8, 9, 10, 11]
    stored = [0, 1, 0, 0, 1, 0]
    assert inputs.visible[0, 1].int().tolist() == [*stored, 1, 1, 0, 0, 0, 0]
    assert inputs.visible[0, 5].int().tolist() == [*stored, 1, 1, 1, 1, 0, 1]
    assert inputs.key_positions[0].tolist() == [0, 0, 0, 0, 1, 0, 2, 3, 4, 5, 6, 6]


def test_padding_sees_as_the_root_and_is_seen_by_nobody() -> None:
    idle = PaddedWork(row=1, stored=7, pending=[], first_index=7, fill=4)
    inputs = pack_padded([padded(WORK[0], fill=1), idle, FILLED], TREE)
    assert inputs.tokens == [1, 2, 3, 5, 6, 7, 5, 0, 0, 0, 0, 8, 8, 8, 8]
    assert inputs.nodes == [3, 4, 5, 11], "padding is not a node"
    # Row 0 has three nodes, so the head runs three tokens of each of the other rows.
    assert inputs.head_padding == [7, 8, 9, 12, 13]
    _, fork, nothing, root = inputs.segments
    assert list(fork.cache_indices) == [5, 6, 7, 8]
    assert list(nothing.cache_indices) == [7, 8, 9, 10]
    assert fork.num_keys == 8
    assert fork.visible is not None
    assert fork.visible[3].int().tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert (nothing.start, nothing.end, nothing.num_keys, nothing.visible) == (7, 11, 1, None)
    assert (root.start, root.end, root.num_keys, root.visible) == (11, 15, 5, None)


def test_queries_that_stand_after_all_that_is_stored() -> None:
    whole = RowWork(row=1, stored=4, pending=[]).query_segment(start=2, count=3)
    assert (whole.slot, whole.start, whole.end, whole.num_keys) == (1, 2, 5, 4)
    assert whole.position.tolist() == [4, 4, 4]
    assert whole.visible is None
    gaps = PaddedWork(row=0, stored=2, pending=[], first_index=5, stored_indices=[1, 4])
    held = gaps.query_segment(start=0, count=2)
    assert held.visible is not None
    assert held.visible.tolist() == [[False, True, False, False, True]] * 2
    assert held.position.tolist() == [2, 2]


def test_padded_rows_go_on_at_one_place_as_in_the_paper() -> None:
    """As in Table 1, the rows gain 4 and 1 tokens, then 2 and 6."""
    rows, texts = storage(), [list(prompt) for prompt in PROMPTS]
    first = step(rows, texts, [5, 2], [3, 0])
    # Prompts end at the same index; the prompt of row 1 has three gaps before it.
    assert [w.root_index for w in first] == [4, 4]
    assert vars(first[0])["stored_indices"] is None
    assert first[1].key_positions().tolist() == [-1, -1, -1, 0]
    second = step(rows, texts, [2, 5], [1, 5])
    assert [w.root_index for w in second] == [8, 8]
    assert vars(second[0])["stored_indices"] is None
    assert second[1].key_positions().tolist() == [-1, -1, -1, 0, 1, -1, -1, -1]
    third = step(rows, texts, [0, 0], [0, 0])
    assert [w.root_index for w in third] == [14, 14]
    assert [int((w.key_positions() < 0).sum()) for w in third] == [4, 3 + 3]
    for row, w in enumerate(third):
        entries = (w.key_positions() >= 0).nonzero()[:, 0].tolist()
        values = stored(rows, row, 14)
        assert [values[entry] for entry in entries] == texts[row][:-2]


def test_idle_rows_have_room_behind_what_they_hold() -> None:
    for batching, expected in (("unpadded_kv", 2), ("padded", 5)):
        rows, texts = storage(batching), [list(prompt) for prompt in PROMPTS]
        step(rows, texts, [0, 0], [0, 0])
        assert isinstance(rows, PaddedStorage)
        (idle,) = rows.idle_rows({0})
        assert (idle.row, idle.root_index, idle.num_tokens) == (1, expected, 0)


def test_nodes_of_the_round_are_behind_an_idle_row_too() -> None:
    rows, texts = storage("unpadded_kv"), [list(prompt) for prompt in PROMPTS]
    tree = chains(texts, [3, 2])
    rows.plan(tree, texts, range(7))
    rows.mark_ran(rows.plan(tree, texts, range(7)))
    assert isinstance(rows, PaddedStorage)
    (idle,) = rows.idle_rows({0})
    assert idle.root_index == 1 + 3
