"""Stable splits of prompts, equal to those of existing adapters, and figures checked by hand."""

from __future__ import annotations

import pytest
import torch

from hf_spec import OptionError
from hf_spec.training.features import Text
from hf_spec.training.held_out import (
    acceptance,
    by_slot,
    learned_and_held,
    split_by_hash,
    split_by_seed,
    tau,
)
from hf_spec.training.responses import Response

IDS = [f"p{n}" for n in range(20)]


class TestHash:
    def test_a_prompt_keeps_its_side(self) -> None:
        names = [f"p{n}" for n in range(400)]
        learned, held = split_by_hash(names, 0.25, str)
        assert 60 < len(held) < 140
        assert sorted(learned + held) == sorted(names)
        assert split_by_hash(held, 0.25, str) == ([], held)

    def test_items_of_one_prompt_stay_together(self) -> None:
        items = [(n % 20, n) for n in range(60)]
        learned, held = split_by_hash(items, 0.25, lambda item: f"p{item[0]}")
        assert {prompt for prompt, _ in learned}.isdisjoint(prompt for prompt, _ in held)
        assert len(learned) + len(held) == 60

    def test_it_chooses_as_it_did_for_the_adapters_there_are(self) -> None:
        _, held = split_by_hash(IDS, 0.25, str)
        assert held == ["p0", "p2", "p7", "p9", "p11", "p17"]


class TestAnswers:
    def test_they_go_by_their_prompts(self) -> None:
        texts = [Text(Response(prompt, "chat", [1], [n])) for n, prompt in enumerate(IDS + IDS)]
        learned, held = learned_and_held(texts, 0.25, "answers")
        assert [text.response.id for text in held] == split_by_hash(IDS, 0.25, str)[1] * 2
        assert len(learned) + len(held) == len(texts)

    @pytest.mark.parametrize("prompt", ["p0", "p1"])
    def test_neither_side_may_be_empty(self, prompt: str) -> None:
        with pytest.raises(OptionError, match="1 answers are too few for a training set"):
            learned_and_held([Text(Response(prompt, "chat", [1], [2]))], 0.25, "answers")


class TestSeed:
    def test_the_share_is_exact_and_nothing_is_on_both_sides(self) -> None:
        ids = [f"p{n}" for n in range(40)] * 2
        learned, held = split_by_seed(ids, 0.15, 0)
        assert learned.isdisjoint(held)
        assert learned | held == set(ids)
        assert len(held) == 6
        assert split_by_seed(ids[::-1], 0.15, 0) == (learned, held)
        assert split_by_seed(ids, 0.15, 1) != (learned, held)

    @pytest.mark.parametrize(("share", "num_held"), [(0.01, 1), (0.99, 2)])
    def test_neither_side_is_empty(self, share: float, num_held: int) -> None:
        learned, held = split_by_seed(["a", "b", "c"], share, 0)
        assert (len(learned), len(held)) == (3 - num_held, num_held)

    def test_one_prompt_cannot_be_split(self) -> None:
        with pytest.raises(OptionError, match="1 prompts with an answer are too few"):
            split_by_seed(["a", "a"], 0.5, 0)

    def test_it_chooses_as_it_did_for_the_adapters_there_are(self) -> None:
        _, held = split_by_seed(IDS, 0.25, 0)
        assert held == {"p12", "p13", "p15", "p3", "p9"}


RIGHT = [[True, True, False], [True, False], [False, True, True], [True]]


def test_shares_of_drafts_of_different_lengths() -> None:
    assert by_slot(RIGHT) == pytest.approx(
        {
            "slot_1": 3 / 4,
            "slot_1_given": 3 / 4,
            "slot_2": 2 / 3,
            "slot_2_given": 1 / 2,
            "slot_3": 1 / 2,
            "slot_3_given": 0.0,
        }
    )


def test_places_that_no_draft_reached() -> None:
    assert by_slot([[True]], 2)["slot_2"] == by_slot([], 1)["slot_1_given"] == 0
    assert by_slot([]) == {}


def test_tau_of_rounds_counted_by_hand() -> None:
    # Rounds begin at positions 0, 3 and 0, 1; they accept 2, 2 and 0, 1 tokens.
    assert tau([[2, 1, 0, 2, 1, 0], [0, 1]]) == 5 / 4
    assert tau([]) == 0


def test_alpha_is_the_share_of_tokens_that_were_drafted() -> None:
    # One round accepts two draft tokens, one none: two of four tokens come from drafts.
    figures = acceptance([torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]]).bool()])
    assert (figures["tau"], figures["alpha"]) == (1.0, 0.5)
    assert acceptance([])["alpha"] == 0
