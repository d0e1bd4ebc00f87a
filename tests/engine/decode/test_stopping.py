"""Stop rules of single rows, batch criteria evaluated once per step, and where rows end."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import EosTokenCriteria, MaxTimeCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.generation_state import MAX_LEAD
from hf_spec.engine.decode.stopping import StopRules, for_one_sequence
from tests import tiny_models
from tests.row_states import EndAllOn, EndRowOn, commit, make_state


class Longer(MaxLengthCriteria):
    """Subclass of a known criterion, which may do anything."""


class OwnEnd(EosTokenCriteria):
    """Another such subclass."""


def stop_string() -> StopStringCriteria:
    return StopStringCriteria(tiny_models.tokenizer(), ["ba"])


@pytest.mark.parametrize(
    "criterion",
    [MaxLengthCriteria(9), EosTokenCriteria(3), MaxTimeCriteria(9.0), stop_string()],
    ids=lambda criterion: type(criterion).__name__,
)
def test_classes_of_transformers_that_look_at_one_row_are_not_asked(criterion: Any) -> None:
    assert not StopRules([criterion], 2).has_batch_criteria


@pytest.mark.parametrize(
    "criterion",
    [Longer(9), OwnEnd(3), ConfidenceCriteria(0.4), lambda input_ids, scores: False],
    ids=lambda criterion: type(criterion).__name__,
)
def test_any_other_is_asked(criterion: Any) -> None:
    rules = StopRules([criterion], 2)
    assert rules.has_batch_criteria
    assert rules.max_length is None
    assert not rules.ends_sequence(3)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_lengths_are_integers_of_any_type(kind: Any) -> None:
    rules = StopRules([MaxLengthCriteria(kind(7)), MaxLengthCriteria(kind(5))], 1)
    assert rules.max_length == 5
    assert type(rules.max_length) is int


def test_rules_for_single_rows() -> None:
    rules = StopRules([MaxLengthCriteria(5), EosTokenCriteria([3, 4]), stop_string()], 2)
    ends = tiny_models.tokenizer().convert_tokens_to_ids("ba")
    for text, ended in (([5, 6], False), ([5, 4], True), ([5] * 5, True), ([5, ends], True)):
        assert rules.end_row(text[-1], len(text), partial(torch.tensor, text)) == ended


class PerRow(StoppingCriteria):
    def __init__(self, *rows: bool):
        self.rows = rows
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.tensor(self.rows)


def test_every_criterion_is_asked_once_and_one_answer_is_enough() -> None:
    criteria = PerRow(True, False, False), PerRow(True, False, True)
    rules = StopRules(criteria, 3)
    assert rules.end_rows(torch.zeros(3, 4, dtype=torch.long), None) == [True, False, True]
    assert [criterion.calls for criterion in criteria] == [1, 1]


class Rewriting(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        input_ids[:, -1] = 7
        return False


def test_a_criterion_that_rewrites_the_text_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Rewriting changed its input_ids.*processor"):
        StopRules([Rewriting()], 1).end_rows(torch.zeros(1, 4, dtype=torch.long), None)


def test_tensors_of_inference_mode_are_shown_too() -> None:
    with torch.inference_mode():
        shown = torch.zeros(2, 4, dtype=torch.long)
        assert StopRules([PerRow(True, False)], 2).end_rows(shown, None) == [True, False]


@pytest.mark.parametrize(
    ("criterion", "pads"), [(OwnEnd(3), True), (EosTokenCriteria(3), True), (PerRow(True), False)]
)
def test_rows_are_padded_where_there_is_an_end_of_sequence(criterion: Any, pads: bool) -> None:
    assert StopRules([criterion], 2).pads == pads


def test_one_of_several_sequences_has_criteria_of_its_own() -> None:
    length, mine = MaxLengthCriteria(5), PerRow(False)
    copies = for_one_sequence([length, mine])
    assert copies[0] is length
    assert copies[1] is not mine
    StopRules(copies, 1).end_rows(torch.zeros(1, 4, dtype=torch.long), None)
    assert mine.calls == 0


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
    """Plain generate() does not pad then: rows that met a rule continue until all have met one."""
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
    # The whole batch in one call per step, with scores only if they are kept.
    assert criterion.shown == [([2, length], None) for length in (5, 6, 7)]


def test_a_criterion_with_one_answer_for_all() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(99), EndAllOn(12))
    commit(state, [11, 12, 13], [11])
    assert state.unfinished == [0, 1], "row 1 has no second token yet"
    commit(state, [14], [15, 16])
    assert state.finished == [True, True]
    assert state.finish().sequences[:, 4:].tolist() == [[11, 12], [11, 15]]


class ShowFrames(StoppingCriteria):
    """Criterion that never ends a row and records its inputs."""

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
    """Criterion that returns the same value at every step."""

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


def test_criteria_wait_for_the_scores_of_rows_that_have_ended() -> None:
    """Plain generate() keeps running such rows on padding and passes their scores as well."""
    criterion = EndRowOn(98, 98)
    rules = MaxLengthCriteria(9), EosTokenCriteria(12), criterion
    state = make_state(*rules, keep_scores=True)
    ones = torch.ones(3)
    commit(state, [11, 12, 13], [14], scores=[[ones * 1, ones * 2, ones * 3], [ones * 4]])
    assert state.missing_scores() == {}, "row 0 was not asked about up to its end"
    commit(state, [], [15, 16, 17], scores=[[], [ones * 5, ones * 6, ones * 7]])
    assert len(criterion.shown) == 2
    assert state.missing_scores() == {0: range(2)}
    state.add_padding_scores({0: [ones * 8, ones * 9]})
    assert state.missing_scores() == {}
    assert len(criterion.shown) == 4
    seen = [step[:, 0].tolist() for step in criterion.shown[-1][1]]
    assert seen == [[1, 4], [2, 5], [8, 6], [9, 7]]
    commit(state, [], [18], scores=[[], [ones * 10]])
    assert state.missing_scores() == {0: range(2, 3)}
    state.add_padding_scores({0: [ones * 11]})
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


def test_time_is_up_for_every_row() -> None:
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(99), MaxTimeCriteria(0.0))
    commit(state, [11, 12], [13, 14])
    assert state.finished == [True, True]
    assert state.generated == [1, 1]
