"""Every split of a text runs the same tokens, and the first difference is located."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.studies.bfloat16_invariance.splits import (
    States,
    compare_splits,
    first_difference,
    run_chunks,
)

TEXTS = [[5, 9, 23, 5, 9, 41, 7], [8, 3, 3, 60, 2, 11, 4]]


@pytest.mark.parametrize(("size", "siblings"), [(1, 0), (3, 0), (3, 2), (0, 0)])
def test_every_split_runs_the_model_on_the_text(model: Any, size: int, siblings: int) -> None:
    with torch.no_grad():
        expected = model(torch.tensor(TEXTS), output_hidden_states=True)
    for row, found in enumerate(run_chunks(model, TEXTS, size, siblings)):
        for one, other in zip(found.hidden, expected.hidden_states, strict=True):
            torch.testing.assert_close(one, other[row], atol=1e-4, rtol=1e-4)
        assert sorted(found.logits) == ([6] if size == 0 else list(range(7)))
        for position, logits in found.logits.items():
            torch.testing.assert_close(logits, expected.logits[row, position], atol=1e-3, rtol=1e-3)


def test_a_planted_difference_is_found() -> None:
    def states() -> States:
        return States([torch.zeros(3, 2), torch.ones(3, 2)], {2: torch.zeros(4)})

    other = states()
    assert first_difference(states(), other) is None
    other.logits[2][1] = 1
    assert first_difference(states(), other) == {"states": "logits", "tokens": 1}
    other.hidden[1][2, 0] = 2
    assert first_difference(states(), other) == {"states": 1, "tokens": 1, "of": 3}


def test_splits_have_names(model: Any) -> None:
    rows = compare_splits(model, TEXTS, chunks=(2,), trees=((3, 1),))
    assert [row["split"] for row in rows] == [
        "chunks of 2",
        "all at once",
        "paths of 3 with 1 siblings",
        *(f"2 rows, chunks of {size}" for size in (0, 1, 8)),
    ]
