"""Comparisons: both answers equal `generate()`; colors and pictures match the rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_spec
from hf_spec.cli.demo.replay import Lane
from hf_spec.cli.ui.comparison import Comparer, Comparison
from hf_spec.evaluation.trace.rounds import draw_round
from hf_spec.methods.entries import parse_entries
from tests import tiny_models
from tests.cli.ui.conftest import LOOKUP, NEW_TOKENS, PROMPT
from tests.serving.conftest import plain, speller
from tests.tiny_models import build


def text_of(lane: Lane) -> str:
    return "".join(piece.text for piece in lane.pieces)


def test_both_answers_are_those_of_generate(comparison: Comparison) -> None:
    assert [text_of(lane) for lane in comparison.lanes] == [plain(PROMPT, NEW_TOKENS)] * 2
    assert [record.identical for record in comparison.records] == [True, True]
    assert [lane.title for lane in comparison.lanes] == ["plain", LOOKUP]


def test_times_are_those_of_the_timed_runs(comparison: Comparison) -> None:
    for lane, record in zip(comparison.lanes, comparison.records, strict=True):
        assert lane.seconds == record.seconds
        assert lane.num_tokens == record.new_tokens == NEW_TOKENS
        assert 0 < lane.pieces[0].seconds <= lane.pieces[-1].seconds <= lane.seconds


def test_what_is_drafted_is_what_each_round_accepted(comparison: Comparison) -> None:
    """Block i of the answer holds the tokens of round i."""
    assert not any(piece.drafted for piece in comparison.lanes[0].pieces)
    stats = comparison.records[1].stats
    assert stats is not None
    assert stats.accepted_tokens > 0
    assert len(comparison.rounds) == stats.rounds
    for number, one in enumerate(comparison.rounds):
        *accepted, bonus = one.verdict.tokens(0)
        pieces = [piece for piece in comparison.lanes[1].pieces if piece.block == number]
        drafted = "".join(piece.text for piece in pieces if piece.drafted)
        own = "".join(piece.text for piece in pieces if not piece.drafted)
        shown = [speller().decode(part, skip_special_tokens=True) for part in (accepted, [bonus])]
        assert [drafted, own] == shown


def test_the_first_round_shown_has_most_accepted(comparison: Comparison) -> None:
    accepted = [len(one.verdict.accepted[0]) for one in comparison.rounds]
    assert accepted[comparison.fullest] == max(accepted) > accepted[0]


def test_the_picture_is_that_of_the_round(comparison: Comparison) -> None:
    pictures = [str(comparison.picture(number)) for number in range(len(comparison.rounds))]
    assert pictures == [str(draw_round(one, comparison.decode)) for one in comparison.rounds]
    assert len(set(pictures)) > 1


def test_without_drafts_nothing_is_colored(compared: Any) -> None:
    found = compared("none")
    assert not any(piece.drafted for piece in found.lanes[1].pieces)
    assert len(found.rounds) == NEW_TOKENS
    assert found.records[1].tau == 0


def test_assistants_and_layers_of_the_model() -> None:
    entries = parse_entries(["gsd", "draft@truncated:1"], ["truncated:2"])
    comparer = Comparer(build("llama"), speller(), entries)
    assert list(comparer.entries) == ["gsd", "draft@truncated:1"]
    for name in comparer.entries:
        found = comparer.compare(PROMPT, name, 12)
        assert found.records[1].identical
        assert len(found.rounds) < 12


def test_an_assistant_of_another_model_is_refused_at_once() -> None:
    entries = parse_entries([f"sdsat@{tiny_models.disco_adapter('llama')}"])
    with pytest.raises(hf_spec.AssistantError, match="sdsat"):
        Comparer(build("llama"), speller(), entries)


def test_a_stored_strategy_does_not_reach_the_plain_answer(
    comparer: Comparer, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(comparer.model.generation_config), "spec_strategy", "lookup")
    found = compared("none")
    assert found.records[0].target_forwards == NEW_TOKENS
    config: Any = comparer.model.generation_config
    assert config.spec_strategy == "lookup"


def test_the_model_is_left_as_found(comparer: Comparer, compared: Any) -> None:
    model = comparer.model

    def facts() -> Any:
        hooks = [(*m._forward_hooks, *m._forward_pre_hooks) for m in model.modules()]
        config = vars(model.generation_config).copy()
        return config, model.config.to_dict(), model.training, hooks

    before, weights = facts(), {name: w.clone() for name, w in model.state_dict().items()}
    compared(LOOKUP)
    assert facts() == before
    assert all(torch.equal(weights[name], w) for name, w in model.state_dict().items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  \n", "the prompt is empty"),
        ("ba" * 250, r"the prompt has 25\d tokens; .* context of 256"),
    ],
)
def test_prompts_that_cannot_be_answered(comparer: Comparer, text: str, message: str) -> None:
    with pytest.raises(hf_spec.OptionError, match=message):
        comparer.compare(text, LOOKUP, NEW_TOKENS)
