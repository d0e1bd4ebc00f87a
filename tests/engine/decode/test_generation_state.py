"""Sequences under generation: stop rules, frames, padding, scores, streamed blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria
from transformers.generation import EosTokenCriteria, MaxTimeCriteria

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.generation_state import MAX_LEAD, GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.streaming import BatchStreamer
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict

PROMPT = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


class EndRowOn(StoppingCriteria):
    """Ends row r with token `ends[r]`, and remembers what it was shown."""

    def __init__(self, *ends: int):
        self.ends = torch.tensor(ends)
        self.shown: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shown.append((list(input_ids.shape), scores))
        return input_ids[:, -1] == self.ends


class EndAllOn(StoppingCriteria):
    """The old form of a criterion: one answer for the whole batch."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return bool((input_ids[:, -1] == self.token).any())


class Recorder:
    """A streamer that keeps its blocks."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.blocks.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def make_state(*criteria: Any, rows: slice = slice(None), **options: Any) -> GenerationState:
    prompt, mask = PROMPT[rows], MASK[rows]
    return GenerationState.create(prompt, mask, StopRules(criteria, len(prompt)), **options)


def commit(state: GenerationState, *blocks: list[int], **extra: Any) -> None:
    """Commit one block per row: its last token is the bonus, an empty one a finished row."""
    rows = []
    for tokens, block in zip(state.tokens, blocks, strict=True):
        nodes = [tokens[-1], *block[:-1]] if block else []
        rows.append((nodes, list(range(-1, len(nodes) - 1))))
    tree = DraftTree.from_rows(rows)
    accepted = [list(tree.nodes(row))[1:] for row in range(len(blocks))]
    bonus = [block[-1] if block else None for block in blocks]
    state.commit(Verdict(tree, accepted, bonus, **extra))


def test_padding_is_left_out_of_tokens_but_not_of_frames() -> None:
    state = make_state(MaxLengthCriteria(20))
    assert state.tokens == [[5, 6], [7, 8, 9, 10]]
    commit(state, [11, 12], [13])
    assert state.prefix(0).tolist() == [0, 0, 5, 6, 11, 12]
    assert state.prefix(1).tolist() == [7, 8, 9, 10, 13]
    assert [state.frame_length(row) for row in (0, 1)] == [6, 5]
    assert [state.room(row) for row in (0, 1)] == [14, 15]
    assert state.draft_limits == {0: 13, 1: 14}
    assert state.tokens == [[5, 6, 11, 12], [7, 8, 9, 10, 13]]


def test_a_path_is_shown_behind_the_frame_and_not_kept() -> None:
    state = make_state(MaxLengthCriteria(20))
    assert state.prefix(0, [30, 31]).tolist() == [0, 0, 5, 6, 30, 31]
    assert state.prefix(0, [32]).tolist() == [0, 0, 5, 6, 32]
    assert state.prefix(0).tolist() == [0, 0, 5, 6]


def test_frames_grow_where_no_length_is_set() -> None:
    prompt = torch.tensor([[3]])
    state = GenerationState.create(prompt, torch.ones_like(prompt), StopRules([], 1))
    path = list(range(40))
    assert state.prefix(0, path).tolist() == [3, *path]
    for token in path:
        state.append(0, token)
    assert state.prefix(0).tolist() == [3, *path]


@pytest.mark.parametrize(
    ("ids", "ends"), [([12], [2, 3]), ([11, 13], [1, 1])], ids=["one id", "several ids"]
)
def test_end_of_sequence_cuts_the_block_of_its_row(ids: list[int], ends: list[int]) -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(ids), pad_token_id=99)
    blocks = [11, 12, 13], [13, 14, 12, 15]
    commit(state, *blocks)
    assert state.finished == [True, True]
    assert state.generated == ends
    assert state.tokens[0][2:] == blocks[0][: ends[0]]
    assert state.tokens[1][4:] == blocks[1][: ends[1]]


def test_rows_end_on_their_own_and_are_padded() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(12), pad_token_id=99)
    commit(state, [11, 12, 13], [14, 15])
    assert state.unfinished == [1]
    commit(state, [], [16, 12])
    output = state.finish()
    assert output.sequences.tolist() == [
        [0, 0, 5, 6, 11, 12, 99, 99],
        [7, 8, 9, 10, 14, 15, 16, 12],
    ]
    masks = state.output_masks(8)
    assert masks[0].tolist() == [False, False, *[True] * 6], "padding after the end is run"
    assert masks[1].tolist() == [True] * 8


def test_without_an_end_of_sequence_all_rows_end_where_the_last_one_does() -> None:
    """Plain generate() pads nothing then: rows that met a rule go on until all have met one."""
    state = make_state(MaxLengthCriteria(20), EndRowOn(12, 18), pad_token_id=99)
    commit(state, [11, 12, 13], [14, 15])
    assert state.unfinished == [0, 1]
    commit(state, [16, 12, 17], [16, 17, 18, 19])
    assert state.unfinished == []
    assert state.finish().sequences.tolist() == [
        [0, 0, 5, 6, 11, 12, 13, 16, 12],
        [7, 8, 9, 10, 14, 15, 16, 17, 18],
    ]


def test_without_an_end_of_sequence_a_short_row_catches_up() -> None:
    state = make_state(MaxLengthCriteria(20), EndRowOn(12, 18))
    commit(state, [12], [14, 15, 18])
    assert state.unfinished == [0, 1], "nobody was asked about row 1 beyond the length of row 0"
    commit(state, [13, 14, 15], [19])
    assert state.unfinished == []
    assert state.finish().sequences[:, 4:].tolist() == [[12, 13, 14], [14, 15, 18]]


def test_a_row_at_maximum_length_waits_no_longer() -> None:
    state = make_state(MaxLengthCriteria(7), EndRowOn(12, 18))
    commit(state, [11, 12, 13, 14], [14])
    assert state.unfinished == [1]
    assert state.generated == [3, 1]
    commit(state, [], [18])
    assert state.unfinished == []
    assert state.finish().sequences[:, 4:].tolist() == [[11, 12], [14, 18]]


def test_maximum_length_counts_padding_and_the_lowest_one_rules() -> None:
    state = make_state(MaxLengthCriteria(20), MaxLengthCriteria(6), EosTokenCriteria(99))
    assert state.room(0) == state.room(1) == 2
    commit(state, [11, 12, 13], [14])
    assert state.finished == [True, False]
    assert state.tokens[0] == [5, 6, 11, 12]


def test_a_criterion_answers_for_its_own_row() -> None:
    criterion = EndRowOn(12, 14)
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(99), criterion)
    commit(state, [14, 12, 13], [12, 13, 14, 15])
    assert state.generated == [2, 3]
    assert state.finished == [True, True]
    # The whole batch, one call per step, scores only where they are kept.
    assert criterion.shown == [([2, length], None) for length in (5, 6, 7)]


def test_a_criterion_with_one_answer_for_all() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(99), EndAllOn(12))
    commit(state, [11, 12, 13], [11])
    assert state.unfinished == [0, 1], "row 1 has no second token yet"
    commit(state, [14], [15, 16])
    assert state.finished == [True, True]
    assert state.finish().sequences[:, 4:].tolist() == [[11, 12], [11, 15]]


class ShowFrames(StoppingCriteria):
    """Ends nothing and keeps what it was shown."""

    def __init__(self) -> None:
        self.frames: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.frames.append(input_ids[:, 4:].tolist())
        return False


def test_rows_that_ended_are_shown_padded_and_rows_ahead_as_they_were() -> None:
    criterion = ShowFrames()
    rules = MaxLengthCriteria(20), EosTokenCriteria(12), criterion
    state = make_state(*rules, pad_token_id=99)
    commit(state, [11, 12, 13], [14])
    assert criterion.frames == [[[11], [14]]]
    commit(state, [], [15, 16, 12])
    assert criterion.frames[1:] == [
        [[11, 12], [14, 15]],
        [[11, 12, 99], [14, 15, 16]],
        [[11, 12, 99, 99], [14, 15, 16, 12]],
    ]
    assert state.finished == [True, True]


def test_a_row_that_ended_by_itself_may_end_earlier_by_a_criterion() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(12), EndAllOn(30), pad_token_id=99)
    commit(state, [11, 13, 14, 12], [15])
    assert state.unfinished == [1]
    commit(state, [], [30])
    assert state.unfinished == []
    assert state.finish().sequences[:, 4:].tolist() == [[11, 13], [15, 30]]
    rows = state.stats.rows
    assert [row.new_tokens for row in rows] == [2, 2]
    assert [row.accepted_tokens for row in rows] == [2, 0]
    assert rows[0].accepted_by_position == [1, 1]


def test_rows_draft_no_further_ahead_than_pays() -> None:
    options = {"stop": (MaxLengthCriteria(400), EosTokenCriteria(99))}
    state = make_state(*options["stop"], EndAllOn(12))
    free = make_state(*options["stop"])
    block = list(range(13, 13 + MAX_LEAD))
    for one in (state, free):
        commit(one, block, [14])
    assert [state.room(row) for row in (0, 1)] == [1, free.room(1)]
    assert free.room(0) == 400 - 4 - MAX_LEAD
    commit(state, [11], [14, 15, 16])
    assert state.room(0) == MAX_LEAD - (MAX_LEAD + 1 - 4)


class Answer(StoppingCriteria):
    """Says the same at every step."""

    def __init__(self, answer: Any):
        self.answer = answer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        (True, [True, True]),
        (False, [False, False]),
        (torch.tensor(True), [True, True]),
        (torch.tensor([True]), [True, True]),
        (torch.tensor([False, True]), [False, True]),
        (torch.tensor([[True, False]]), [True, False]),
        (1, [True, True]),
        (torch.tensor([0, 1]), [False, True]),
    ],
)
def test_whatever_plain_generate_takes_for_an_answer_is_one(answer: Any, ended: list[bool]) -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(99), Answer(answer))
    commit(state, [11], [12])
    assert state.finished == ended


def test_an_answer_of_another_shape_is_refused() -> None:
    state = make_state(MaxLengthCriteria(20), Answer(torch.tensor([[True], [False]])))
    with pytest.raises(UnsupportedError, match=r"Answer .* \(2, 2\) of 2 rows.*shape \(2,\)"):
        commit(state, [11], [12])


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


def test_time_is_up_for_every_row() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(99), MaxTimeCriteria(0.0))
    commit(state, [11, 12], [13, 14])
    assert state.finished == [True, True]
    assert state.generated == [1, 1]


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


def test_criteria_wait_for_the_scores_of_rows_that_have_ended() -> None:
    """Plain generate() runs such rows on, on padding, and shows their scores with the others."""
    criterion = EndRowOn(98, 98)
    rules = MaxLengthCriteria(9), EosTokenCriteria(12), criterion
    state = make_state(*rules, keep_scores=True)
    ones = torch.ones(3)
    commit(state, [11, 12, 13], [14], scores=[[ones * 1, ones * 2, ones * 3], [ones * 4]])
    assert state.missing_scores() == {}, "row 0 was not asked about up to its end"
    commit(state, [], [15, 16, 17], scores=[[], [ones * 5, ones * 6, ones * 7]])
    assert len(criterion.shown) == 2
    assert state.missing_scores() == {0: range(2)}
    state.show_padding({0: [ones * 8, ones * 9]})
    assert state.missing_scores() == {}
    assert len(criterion.shown) == 4
    seen = [step[:, 0].tolist() for step in criterion.shown[-1][1]]
    assert seen == [[1, 4], [2, 5], [8, 6], [9, 7]]
    commit(state, [], [18], scores=[[], [ones * 10]])
    assert state.missing_scores() == {0: range(2, 3)}
    state.show_padding({0: [ones * 11]})
    assert len(criterion.shown) == 5, "asked at the last step, too"
    assert state.missing_scores() == {}
    output = state.finish()
    assert [step[:, 0].tolist() for step in output.scores] == [
        [1, 4],
        [2, 5],
        [0, 6],
        [0, 7],
        [0, 10],
    ]


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


class RowRecorder(BatchStreamer):
    """Keeps what comes of each sequence."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.ended: list[int] = []
        super().__init__(self.add, self.ended.append)

    def add(self, row: int, tokens: list[int]) -> None:
        assert row not in self.ended
        self.rows.setdefault(row, []).extend(tokens)


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
    """Without an end of sequence the rows end where the last one does."""
    streamer = RowRecorder()
    state = make_state(MaxLengthCriteria(20), EndRowOn(12, 18), streamer=streamer)
    commit(state, [11, 12, 13, 14, 15], [14, 15])
    # Nobody was asked about the third token yet.
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
    # Called as for a batch of one, without the padding of the others.
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
    """Table 1: two samples gain 4 and 1 tokens, then 2 and 6; the rows that end count no more."""
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
    # Cut by an end of sequence: what is not in the output was not gained.
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
    # Row 0 ends with its accepted end of sequence: both were kept, the bonus token was not.
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
