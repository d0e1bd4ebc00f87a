"""What a row contributes to a forward: places, positions and padding, with and without gaps."""

from __future__ import annotations

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.row_batch import BATCHING, RowWork, fill_up

TREE = DraftTree.from_rows([([5, 6, 7], [-1, 0, 0]), ([], []), ([8], [-1])])
FORK = RowWork(0, stored=2, pending=[1, 2], nodes=[0, 1, 2], offsets=[0, 1, 2], width=3)


def test_the_names_and_what_they_pad() -> None:
    found = {name: (b.pads_inputs, b.pads_kv) for name, b in BATCHING.items()}
    assert found == {
        "unpadded": (False, False),
        "unpadded_kv": (True, False),
        "unpadded_input": (False, True),
        "padded": (True, True),
    }


def test_without_gaps_places_are_positions() -> None:
    assert (FORK.base, FORK.root_place, FORK.num_keys) == (4, 4, 7)
    assert FORK.places == [2, 3, 4, 5, 6]
    assert FORK.positions(TREE) == [2, 3, 4, 5, 5]
    assert FORK.key_positions().tolist() == [0, 1, 2, 3]


def test_gaps_move_places_and_leave_positions() -> None:
    work = RowWork(0, 2, [1, 2], nodes=[0, 1, 2], offsets=[0, 1, 2], width=3, start=7, held=[0, 4])
    assert (work.base, work.root_place, work.num_keys) == (4, 9, 12)
    assert work.places == [7, 8, 9, 10, 11]
    assert work.positions(TREE) == FORK.positions(TREE)
    assert work.tokens(TREE) == FORK.tokens(TREE)
    assert work.key_positions().tolist() == [0, -1, -1, -1, 1, -1, -1, 2, 3]


def test_padding_fills_every_row_up_to_the_longest() -> None:
    root = RowWork(2, stored=4, pending=[], nodes=[3], offsets=[0], width=1)
    idle = RowWork(1, stored=6, pending=[], start=6)
    rows = fill_up([FORK, root], [idle])
    assert [w.row for w in rows] == [0, 1, 2]
    assert [w.fill for w in rows] == [0, 5, 4]
    assert [len(w.tokens(TREE)) for w in rows] == [5, 5, 5]
    assert [len(w.positions(TREE)) for w in rows] == [5, 5, 5]
    # Copies of the root after everything that the row holds.
    assert root.tokens(TREE) == [8] * 5
    assert root.positions(TREE) == [4] * 5
    assert root.places == [4, 5, 6, 7, 8]
    assert idle.places == [6, 7, 8, 9, 10]
    assert [w.num_tokens for w in rows] == [5, 0, 1], "padding is no token"
