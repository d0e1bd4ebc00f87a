"""Tables of the batch benchmark, from handmade records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.studies.ems_sd.batch_report import markdown, plot, summary
from examples.studies.ems_sd.padding import accuracy_for, padding_ratio

SECONDS = {"plain": 4.0, "padded": 5.0, "unpadded_input": 4.0, "unpadded_kv": 3.0, "unpadded": 2.0}


def records(size: int) -> list[dict[str, Any]]:
    """Return records of two repetitions; the second takes twice the time throughout."""
    return [
        {
            "method": "lookup",
            "batch_size": size,
            "contender": name,
            "seconds": seconds * factor,
            "plain_seconds": 4.0 * factor,
            # The prefill takes 1 s, or 2 s for `padded` and `plain`.
            "prompt_seconds": (2.0 if name in ("plain", "padded") else 1.0) * factor,
            "plain_prompt_seconds": 2.0 * factor,
            "new_tokens": 100,
            "linear_tokens": 700 if name == "padded" else 300,
            "prompt_tokens": 100,
            "identical": name != "unpadded_kv",
            "padding_ratio": None if name == "plain" else 0.5,
            "accepted_length_mean": None if name == "plain" else 2.5,
            "accepted_length_min": None if name == "plain" else 1.25,
        }
        for factor in (1, 2)
        for name, seconds in SECONDS.items()
    ]


def test_speeds_compare_within_a_repetition() -> None:
    (row,) = summary(records(8), {"lookup": 8})
    assert row["ratio"] == {
        "plain": 1.0,
        "padded": 0.8,
        "unpadded_input": 1.0,
        "unpadded_kv": pytest.approx(4 / 3),
        "unpadded": 2.0,
    }
    assert row["unpadded_to_padded"] == 2.5
    assert row["tokens_per_second"]["plain"] == pytest.approx((25 + 12.5) / 2)
    assert row["linear_tokens"]["padded"] == 7
    assert (row["identical"], row["outputs"]) == (8, 10)


def test_decoding_alone() -> None:
    (row,) = summary(records(8), {"lookup": 8})
    assert row["decoding_ratio"] == {
        "plain": 1.0,
        "padded": pytest.approx(2 / 3),
        "unpadded_input": pytest.approx(2 / 3),
        "unpadded_kv": 1.0,
        "unpadded": 2.0,
    }
    assert row["decoding_unpadded_to_padded"] == 3.0
    assert row["decoding_tokens"]["padded"] == 6


def test_the_model_is_for_the_same_accepted_length() -> None:
    (row,) = summary(records(8), {"lookup": 8})
    assert row["padding_ratio"] == 0.5
    assert row["accepted_length_mean"] == 2.5
    assert row["padding_ratio_model"] == pytest.approx(padding_ratio(accuracy_for(2.5, 8), 8, 8))
    assert summary(records(1), {"lookup": 8})[0]["padding_ratio_model"] == pytest.approx(0)


def test_tables_say_which_ratio_is_measured(tmp_path: Path) -> None:
    rows = summary([*records(2), *records(8)], {"lookup": 8})
    text = markdown(rows)
    assert "| 8 | 18.8 | 0.80 | 1.00 | 1.33 | 2.00 | 2.50 | 8 of 10 |" in text
    assert "| 8 | 0.67 | 0.67 | 1.00 | 2.00 | 3.00 | 2.00 | 6.00 | 2.00 |" in text
    assert "padding ratio, measured | padding ratio, model of Appendix B" in text
    assert "| 8 | 3.00 | 7.00 | 3.00 | 2.50 | 1.25 | 50.0% |" in text
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
