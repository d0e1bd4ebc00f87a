"""Cells, chi-square tail, and power, checked against scipy and by counting."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from hf_spec.evaluation.lossless.distribution import (
    Path,
    chi_square_tail,
    compare,
    detectable_share,
    divide,
    merge_rare,
    power,
)

END = 3
FIRST = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
SECOND = torch.tensor([0.05, 0.15, 0.3, 0.5, 0.0], dtype=torch.float64)


def next_probs(paths: list[Path]) -> Tensor:
    """Return `FIRST` after an even number of tokens, and `SECOND` after an odd number."""
    return torch.stack([SECOND if len(path) % 2 else FIRST for path in paths])


class TestCells:
    def test_everything_is_in_one_cell(self) -> None:
        cells = divide(next_probs, 2, 0.04, ends=[END])
        assert sum(cells.leaves.values()) + sum(cells.rests.values()) == pytest.approx(1.0)
        assert cells.leaves[0, 3] == pytest.approx(0.25)
        assert cells.leaves[3,] == pytest.approx(0.05)
        assert set(cells.rests) == {(), (0,), (1,), (2,)}
        # After token 1 (0.3), only a token with 0.05 is too rare for a cell: 0.015 < 0.04.
        assert cells.rests[1,] == pytest.approx(0.3 * 0.05)

    def test_places(self) -> None:
        cells = divide(next_probs, 2, 0.04, ends=[END])
        assert cells.locate((0, 3)) == ((0, 3), True)
        assert cells.locate((3,)) == ((3,), True)
        assert cells.locate((1, 0)) == ((1,), True)
        assert cells.locate((1, 4)) == ((1,), False)
        assert cells.locate((4, 0)) == ((), False)

    def test_an_impossible_draw_fails_whatever_the_counts(self) -> None:
        cells = divide(next_probs, 2, 0.04, ends=[END])
        good = [(0, 3)] * 99
        assert compare(cells, [*good, (1, 4)]).impossible == 1
        assert compare(cells, [*good, (1, 4)]).p_value == 0.0


def draws(count: int, first: Tensor) -> list[Path]:
    generator = torch.Generator().manual_seed(1)
    one = torch.multinomial(first, count, replacement=True, generator=generator)
    two = torch.multinomial(SECOND, count, replacement=True, generator=generator)
    pairs = zip(one.tolist(), two.tolist(), strict=True)
    return [(a,) if a == END else (a, b) for a, b in pairs]


def test_right_draws_pass_and_biased_ones_do_not() -> None:
    cells = divide(next_probs, 2, 5 / 2000, ends=[END])
    assert compare(cells, draws(2000, FIRST)).p_value > 1e-3
    biased = FIRST + torch.tensor([0.08, 0, -0.08, 0, 0])
    assert compare(cells, draws(2000, biased)).p_value < 1e-9


def test_rare_cells_share_one() -> None:
    merged = merge_rare([(100.0, 90), (6.0, 7), (2.0, 3), (1.0, 0)])
    assert merged == [(100.0, 90), (9.0, 10)]
    assert merge_rare([(50.0, 50), (7.0, 6), (5.0, 1)]) == [(50.0, 50), (7.0, 6), (5.0, 1)]
    assert sum(seen for _, seen in merged) == 100


@pytest.mark.parametrize("freedom", [1, 7, 120])
@pytest.mark.parametrize("statistic", [0.5, 20.0, 180.0])
def test_the_tail_is_that_of_scipy(statistic: float, freedom: int) -> None:
    expected = stats.chi2.sf(statistic, freedom)
    assert chi_square_tail(statistic, freedom) == pytest.approx(expected, rel=1e-6, abs=1e-300)


@pytest.mark.parametrize("noncentrality", [1.0, 40.0, 200.0])
def test_power_is_that_of_scipy(noncentrality: float) -> None:
    limit = stats.chi2.isf(1e-4, 25)
    expected = stats.ncx2.sf(limit, 25, noncentrality)
    assert power(noncentrality, 25, 1e-4) == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_what_is_said_to_be_detectable_is_detected() -> None:
    share = detectable_share(4000, 12, 1e-4)
    worst = 4 * 4000 * share**2
    assert power(worst, 12, 1e-4) == pytest.approx(0.99, abs=1e-3)
    assert detectable_share(400, 12, 1e-4) > share
    assert detectable_share(0, 0, 1e-4) == 1.0
    assert detectable_share(20, 12, 1e-9) == 1.0
