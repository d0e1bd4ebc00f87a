"""Shares by slot, counted by hand."""

from __future__ import annotations

import pytest

from hf_spec.training.figures import by_slot

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
