"""Stop rules: which criteria are asked per row, and which once per step about the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import EosTokenCriteria, MaxTimeCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.stopping import StopRules, for_one_sequence
from tests import tiny_models


class Longer(MaxLengthCriteria):
    """A subclass may do anything."""


class OwnEnd(EosTokenCriteria):
    """Another one."""


def stop_string() -> StopStringCriteria:
    return StopStringCriteria(tiny_models.tokenizer(), ["ba"])


@pytest.mark.parametrize(
    "criterion",
    [MaxLengthCriteria(9), EosTokenCriteria(3), MaxTimeCriteria(9.0), stop_string()],
    ids=lambda criterion: type(criterion).__name__,
)
def test_classes_of_transformers_that_look_at_one_row_are_not_asked(criterion: Any) -> None:
    assert not StopRules([criterion], 2).asks


@pytest.mark.parametrize(
    "criterion",
    [Longer(9), OwnEnd(3), ConfidenceCriteria(0.4), lambda input_ids, scores: False],
    ids=lambda criterion: type(criterion).__name__,
)
def test_any_other_is_asked(criterion: Any) -> None:
    rules = StopRules([criterion], 2)
    assert rules.asks
    assert rules.max_length is None
    assert not rules.ends_sequence(3)


def test_rules_for_single_rows() -> None:
    rules = StopRules([MaxLengthCriteria(5), EosTokenCriteria([3, 4]), stop_string()], 2)
    ends = tiny_models.tokenizer().convert_tokens_to_ids("ba")
    for text, ended in (([5, 6], False), ([5, 4], True), ([5] * 5, True), ([5, ends], True)):
        assert rules.end_row(torch.tensor(text), text[-1]) == ended


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
    assert rules.ask(torch.zeros(3, 4, dtype=torch.long), None) == [True, False, True]
    assert [criterion.calls for criterion in criteria] == [1, 1]


class Rewriting(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        input_ids[:, -1] = 7
        return False


def test_a_criterion_that_rewrites_the_text_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Rewriting changed the input_ids.*processor"):
        StopRules([Rewriting()], 1).ask(torch.zeros(1, 4, dtype=torch.long), None)


def test_tensors_of_inference_mode_are_shown_too() -> None:
    with torch.inference_mode():
        shown = torch.zeros(2, 4, dtype=torch.long)
        assert StopRules([PerRow(True, False)], 2).ask(shown, None) == [True, False]


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
    StopRules(copies, 1).ask(torch.zeros(1, 4, dtype=torch.long), None)
    assert mine.calls == 0
