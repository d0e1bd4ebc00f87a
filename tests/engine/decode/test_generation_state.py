"""State of a generation: streamed blocks, scores, statistics, and rows that are reused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria
from transformers.generation import EosTokenCriteria

from hf_spec.engine.decode import generation_state
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from tests.row_states import EndRowOn, RowRecorder, commit, make_state


class Recorder:
    """Streamer that records its blocks."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.blocks.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


class FailOn(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        if self.token in input_ids[:, -1]:
            raise KeyError(self.token)
        return False


def test_what_was_let_pass_before_an_exception_is_streamed() -> None:
    streamer = RowRecorder()
    state = make_state(MaxLengthCriteria(20), FailOn(17), streamer=streamer)
    with pytest.raises(KeyError):
        commit(state, [11, 12, 13], [16, 17, 18])
    assert streamer.rows == {0: [11], 1: [16]}


def test_scores_are_kept_per_step_for_committed_tokens_only() -> None:
    criterion = EndRowOn(12, 99)
    options = {"keep_scores": True, "keep_logits": True}
    state = make_state(MaxLengthCriteria(7), EosTokenCriteria(12), criterion, **options)
    vector = torch.ones(3)
    scores = [[vector * 1, vector * 2, vector * 3], [vector * 4, vector * 5, vector * 6]]
    logits = [[-score for score in row] for row in scores]
    commit(state, [11, 12, 13], [14, 15, 16], scores=scores, logits=logits)
    output = state.finish()
    assert output.sequences[:, 4:].tolist() == [[11, 12, 0], [14, 15, 16]]
    assert [step[:, 0].tolist() for step in output.scores] == [[1, 4], [2, 5], [0, 6]]
    assert [step[:, 0].tolist() for step in output.logits] == [[-1, -4], [-2, -5], [0, -6]]
    seen = [[step[:, 0].tolist() for step in shown] for _, shown in criterion.shown]
    assert seen == [[[1, 4]], [[1, 4], [2, 5]]]


def test_the_streamer_gets_committed_blocks_once_and_in_order() -> None:
    streamer = Recorder()
    state = make_state(MaxLengthCriteria(9), EosTokenCriteria(99), rows=slice(1), streamer=streamer)
    commit(state, [11, 12])
    commit(state, [13])
    commit(state, [14, 15, 16, 17])
    assert streamer.ended == 0
    state.finish()
    assert streamer.blocks == [[11, 12], [13], [14, 15]]
    assert streamer.ended == 1


def test_a_device_runs_the_next_forward_pass_before_tokens_are_streamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last tokens of a row are streamed immediately."""
    device = SimpleNamespace(ASYNCHRONOUS={"cpu"})
    monkeypatch.setattr(generation_state, "transfer", device)
    streamer = RowRecorder()
    rules = MaxLengthCriteria(20), EosTokenCriteria(12)
    state = make_state(*rules, streamer=streamer)
    commit(state, [11], [16])
    assert streamer.rows == {}
    state.stream_waiting()
    assert streamer.rows == {0: [11], 1: [16]}
    state.stream_waiting()
    commit(state, [12], [17])
    assert streamer.rows == {0: [11, 12], 1: [16, 17]}
    assert streamer.ended == [0]
    commit(state, [], [18])
    assert streamer.rows[1] == [16, 17]
    state.stream_waiting()
    assert streamer.rows[1] == [16, 17, 18]


def test_a_batch_streamer_hears_of_every_row_and_of_its_end() -> None:
    streamer = RowRecorder()
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(12), streamer=streamer)
    commit(state, [11, 12, 13], [14, 15])
    assert streamer.rows == {0: [11, 12], 1: [14, 15]}
    assert streamer.ended == [0]
    commit(state, [], [16, 12])
    assert streamer.rows == {0: [11, 12], 1: [14, 15, 16, 12]}
    assert streamer.ended == [0, 1]


def test_tokens_that_may_still_be_cut_are_held_back() -> None:
    """Without an EOS token all rows end at the same length as the last one."""
    streamer = RowRecorder()
    state = make_state(MaxLengthCriteria(20), EndRowOn(12, 18), streamer=streamer)
    commit(state, [11, 12, 13, 14, 15], [14, 15])
    # The criterion has not been evaluated for the third token yet.
    assert streamer.rows == {0: [11, 12], 1: [14, 15]}
    commit(state, [16], [17])
    assert streamer.rows == {0: [11, 12, 13], 1: [14, 15, 17]}
    assert streamer.ended == []
    commit(state, [17], [18])
    assert streamer.rows == {0: [11, 12, 13, 14], 1: [14, 15, 17, 18]}
    assert sorted(streamer.ended) == [0, 1]
    assert [row.new_tokens for row in state.stats.rows] == [4, 4]
    assert state.finish().sequences[:, 4:].tolist() == [streamer.rows[0], streamer.rows[1]]


def test_a_row_begins_again_with_rules_and_counts_of_its_own() -> None:
    streamer = RowRecorder()
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(12), streamer=streamer)
    commit(state, [11, 12], [14, 15])
    criterion = EndRowOn(30)
    state.begin(0, 5, [40, 41, 42], StopRules([MaxLengthCriteria(6), criterion], 1))
    assert state.unfinished == [0, 1]
    assert state.tokens == [[40, 41, 42], [7, 8, 9, 10, 14, 15]]
    assert state.prefix(0, [9]).tolist() == [40, 41, 42, 9]
    assert [state.room(row) for row in (0, 1)] == [3, 14]
    commit(state, [50, 51, 52, 53], [16, 30])
    assert state.finished == [True, False], "of length 6; 30 ends only the other one"
    assert state.tokens[0] == [40, 41, 42, 50, 51, 52]
    # Called as for a batch of one, without the padding of the other rows.
    assert [shape for shape, _ in criterion.shown] == [[1, 4], [1, 5], [1, 6]]
    assert streamer.rows == {0: [11, 12], 1: [14, 15, 16, 30], 5: [50, 51, 52]}
    assert streamer.ended == [0, 5]
    rows = state.stats.rows
    assert len(rows) == 6
    assert [row.new_tokens for row in rows] == [2, 4, 0, 0, 0, 3]
    state.begin(0, 2, list(range(60)), StopRules([EndRowOn(30)], 1))
    assert state.prefix(0).tolist() == list(range(60)), "frames grow with the longest prompt"


def test_rows_of_different_calls_do_not_wait_for_each_other() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(12))
    commit(state, [12], [12])
    for row in (0, 1):
        state.begin(row, 2 + row, [5], StopRules([EndRowOn(30 + row)], 1))
    commit(state, [30, 1, 2], [3, 4])
    assert state.finished == [True, False]
    assert state.generated == [1, 2]


def test_statistics_of_the_batch_are_those_of_the_paper() -> None:
    """Table 1: two samples gain 4 and 1 tokens, then 2 and 6; finished rows no longer count."""
    state = make_state(MaxLengthCriteria(40), EosTokenCriteria(99))
    commit(state, [20, 21, 22, 23], [20])
    commit(state, [24, 25], [21, 22, 23, 24, 25, 26])
    stats = state.stats
    assert stats.uneven_tokens == 3 + 4
    assert stats.new_tokens == 13
    assert stats.padding_ratio == pytest.approx(7 / 13)
    assert [row.accepted_length for row in stats.rows] == [3, 3.5]
    assert stats.accepted_length_mean == 3.25
    assert stats.accepted_length_min == 3
    # Cut at an EOS token: only tokens in the output count as gained.
    commit(state, [99, 1, 2], [27, 28])
    assert stats.uneven_tokens == 7 + 1
    commit(state, [], [29, 30, 31])
    assert stats.uneven_tokens == 8
    assert stats.new_tokens == 13 + 1 + 2 + 3


def test_statistics_count_what_was_drafted_and_kept() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(12))
    tree = DraftTree.from_rows([([6, 11, 12, 13], [-1, 0, 1, 0]), ([10, 14], [-1, 0])])
    state.commit(Verdict(tree, [[1, 2], []], [30, 31]))
    stats = state.stats
    assert [row.target_forwards for row in stats.rows] == [1, 1]
    assert [row.drafted_tokens for row in stats.rows] == [3, 1]
    # Row 0 ends at its accepted EOS token: both draft tokens are kept, the bonus token is not.
    assert [row.accepted_tokens for row in stats.rows] == [2, 0]
    assert state.generated == [2, 1]
    assert stats.drafted_by_position == [2, 1]
    assert stats.accepted_by_position == [1, 1]


def test_clocks_add_up() -> None:
    state = make_state(MaxLengthCriteria(20))
    for _ in range(2):
        with state.clock("draft"):
            pass
    with state.clock("verify"):
        pass
    commit(state, [11], [12])
    stats = state.finish().spec_stats
    assert min(stats.draft_seconds, stats.verify_seconds, stats.other_seconds) > 0
