"""Layouts of the new tokens: where each token goes, what it sees, and that nothing is padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_spec.engine.forward import runner as runner_module
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.packing import align_right, pack, past_segment
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.runner import ModelRunner
from tests.tiny_models import build

# Row 0: three pending tokens and a fork; row 1 has ended; row 2: a lone root.
TREE = DraftTree.from_rows([([5, 6, 7], [-1, 0, 0]), ([], []), ([8], [-1])])
WORK = [
    RowWork(row=0, stored=2, pending=[1, 2, 3], nodes=[0, 1, 2], offsets=[0, 1, 2], width=3),
    RowWork(row=2, stored=4, pending=[], nodes=[3], offsets=[0], width=1),
]


def test_packed_tokens_follow_each_other_without_padding() -> None:
    inputs = pack(WORK, TREE)
    assert inputs.tokens == [1, 2, 3, 5, 6, 7, 8]
    assert inputs.positions == [2, 3, 4, 5, 6, 6, 4]
    assert inputs.writes == [(0, 0, 6, slice(2, 8)), (2, 6, 7, slice(4, 5))]
    assert inputs.pending == {0: range(3), 2: range(6, 6)}
    assert inputs.nodes == [3, 4, 5, 6]
    chain, fork, root = inputs.segments
    assert (chain.num_keys, fork.num_keys, root.num_keys) == (5, 8, 5)
    assert chain.visible is not None
    assert chain.visible.sum(dim=1).tolist() == [3, 4, 5]
    assert fork.visible is not None
    assert fork.visible[:, 5:].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert fork.visible[:, :5].all()
    assert fork.key_position.tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert root.visible is None, "one token sees everything"


def test_rectangle_is_aligned_on_the_right_and_pads_to_the_spare_place() -> None:
    inputs = align_right(WORK, TREE, num_rows=3, spare_place=63)
    assert inputs.tokens.tolist() == [[1, 2, 3, 5, 6, 7], [0] * 6, [0, 0, 0, 0, 0, 8]]
    assert inputs.places[0].tolist() == [2, 3, 4, 5, 6, 7]
    assert inputs.places[1].tolist() == [63] * 6
    assert inputs.places[2].tolist() == [63] * 5 + [4]
    assert inputs.visible[1].sum().item() == 6, "padding looks at one key"
    assert inputs.visible[2, -1].int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert inputs.visible[0, 4].int().tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert inputs.key_positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert inputs.nodes == [3, 4, 5, 17]


def test_the_model_is_told_other_positions_than_segments_count() -> None:
    work = [replace(WORK[0], position_offset=-2), WORK[1]]
    plain, moved = pack(WORK, TREE), pack(work, TREE)
    assert moved.positions == [0, 1, 2, 3, 4, 4, 4]
    for before, after in zip(plain.segments, moved.segments, strict=True):
        assert torch.equal(before.position, after.position)
        assert torch.equal(before.key_position, after.key_position)
    line = align_right(work, TREE, num_rows=3, spare_place=63)
    assert line.positions.tolist() == [[0, 1, 2, 3, 4, 4], [0] * 6, [0, 0, 0, 0, 0, 4]]
    assert line.key_positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6]


# The same row 0 with gaps in its storage, and row 2 padded to four tokens.
GAPS = replace(WORK[0], start=6, held=[1, 4])
FILLED = replace(WORK[1], fill=3)


def test_gaps_are_hidden_in_packed_segments() -> None:
    inputs, unpadded = pack([GAPS, WORK[1]], TREE), pack(WORK, TREE)
    assert inputs.tokens == unpadded.tokens
    assert inputs.positions == unpadded.positions
    assert inputs.writes[0] == (0, 0, 6, slice(6, 12))
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
    assert inputs.places[0].tolist() == [6, 7, 8, 9, 10, 11]
    stored = [0, 1, 0, 0, 1, 0]
    assert inputs.visible[0, 1].int().tolist() == [*stored, 1, 1, 0, 0, 0, 0]
    assert inputs.visible[0, 5].int().tolist() == [*stored, 1, 1, 1, 1, 0, 1]
    assert inputs.key_positions[0].tolist() == [0, 0, 0, 0, 1, 0, 2, 3, 4, 5, 6, 6]


def test_padding_sees_as_the_root_and_is_seen_by_nobody() -> None:
    idle = RowWork(row=1, stored=7, pending=[], start=7, fill=4)
    inputs = pack([replace(WORK[0], fill=1), idle, FILLED], TREE)
    assert inputs.tokens == [1, 2, 3, 5, 6, 7, 5, 0, 0, 0, 0, 8, 8, 8, 8]
    assert inputs.nodes == [3, 4, 5, 11], "padding is no node"
    # Three nodes in row 0: as many tokens of the others pass the head.
    assert inputs.fill == [7, 8, 9, 12, 13]
    assert inputs.writes[0] == (0, 0, 7, slice(2, 9))
    _, fork, nothing, root = inputs.segments
    assert fork.num_keys == 8
    assert fork.visible is not None
    assert fork.visible[3].int().tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert (nothing.start, nothing.end, nothing.num_keys, nothing.visible) == (7, 11, 1, None)
    assert (root.start, root.end, root.num_keys, root.visible) == (11, 15, 5, None)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_stretches_of_a_prompt_give_the_hidden_states_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    sequences = [list(range(3, 14)), list(range(20, 24))]
    tree = DraftTree.from_rows([([13, 40], [-1, 0]), ([23], [-1])])

    def run() -> ForwardOutput:
        runner = ModelRunner(model, 2, hidden_layers=(-1,))
        with torch.no_grad(), runner.active():
            return runner.forward(tree, sequences)

    whole = run()
    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", 4)
    parts = run()
    torch.testing.assert_close(parts.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert [len(parts.pending[row]) for row in (0, 1)] == [10, 3]
    for row in (0, 1):
        got, expected = (o.hidden[-1][o.pending[row]] for o in (parts, whole))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        parts.hidden[-1][parts.nodes], whole.hidden[-1][whole.nodes], atol=1e-4, rtol=1e-4
    )


def test_queries_that_stand_after_all_that_is_stored() -> None:
    whole = past_segment(RowWork(row=1, stored=4, pending=[]), start=2, count=3)
    assert (whole.slot, whole.start, whole.end, whole.num_keys) == (1, 2, 5, 4)
    assert whole.position.tolist() == [4, 4, 4]
    assert whole.visible is None
    gaps = RowWork(row=0, stored=2, pending=[], start=5, held=[1, 4])
    held = past_segment(gaps, start=0, count=2)
    assert held.visible is not None
    assert held.visible.tolist() == [[False, True, False, False, True]] * 2
    assert held.position.tolist() == [2, 2]
