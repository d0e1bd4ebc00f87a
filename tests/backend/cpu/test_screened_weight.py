"""The best output from 8-bit scores and exact matmuls equals that of the whole layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hf_spec_kernels.packed_linear import pack_weight, packed_linear
from torch import Tensor

from hf_spec.backend.cpu.screened_weight import ScreenedWeight, screen, timed
from tests.compiler import needs_compiler

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
OUTPUTS, INPUTS = 3001, 96


def weight_of(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a weight whose outputs differ in size, like those of rare and frequent tokens."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    return (weight * torch.rand(OUTPUTS, 1, generator=generator)).to(dtype)


def screened(weight: Tensor) -> ScreenedWeight:
    return screen(weight, pack_weight(weight))


def check(form: ScreenedWeight, states: Tensor) -> Tensor:
    """Compare with all outputs; return the number of computed outputs of each row."""
    whole, best = packed_linear(states, form.exact), form.best(states)
    assert best is not None
    assert (best.shape, best.dtype) == (whole.shape, whole.dtype)
    assert best.argmax(dim=1).tolist() == whole.argmax(dim=1).tolist()
    computed = best.isfinite()
    assert torch.equal(best[computed], whole[computed])
    return computed.sum(dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_best_is_that_of_all(dtype: torch.dtype) -> None:
    weight = weight_of(dtype)
    form = screened(weight)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        # States near an output's weight, as for a confident prediction.
        near = weight[torch.randint(OUTPUTS, (5,), generator=generator)].float()
        states = (near + torch.randn(5, INPUTS, generator=generator)).to(dtype)
        assert check(form, states).max() < OUTPUTS / 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_equal_outputs_is_best(dtype: torch.dtype) -> None:
    """This includes outputs that differ only before they are rounded to the dtype."""
    weight = weight_of(dtype)
    states = weight[700][None] * 4
    weight[[100, 2900]] = weight[700] = weight[700] * 3
    assert check(screened(weight), states).item() >= 3
    # In bfloat16 a sum that is smaller by a thousandth is the same output.
    lower = weight[700].clone()
    lower[weight[700].abs().argmin()] *= 0.5
    weight[50] = lower
    form = screened(weight)
    check(form, states)
    if dtype == torch.bfloat16:
        whole = packed_linear(states, form.exact)
        assert whole[0, 50] == whole[0, 700], "they round to one number"
        assert whole.argmax(dim=1).item() == 50


def test_every_score_is_within_its_margin() -> None:
    weight = weight_of(torch.float32)
    form = screened(weight)
    states = torch.randn(7, INPUTS)
    scores = packed_linear(states, form.codes) * form.scales
    error = (scores.double() - states.double() @ weight.double().T).abs()
    limit = states.norm(dim=1, keepdim=True) * form.margins
    assert (error <= limit).all()
    assert (limit < 0.02 * states.norm(dim=1, keepdim=True) * weight.norm(dim=1)).all()


def near_ties(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight with near-tied outputs in separate blocks, far from the rest, and states."""
    weight, generator = weight_of(torch.float32), torch.Generator().manual_seed(1)
    weight[::300] = weight[50] * 5 + 0.02 * torch.randn(11, INPUTS, generator=generator)
    states = weight[50] + 0.1 * torch.randn(60, INPUTS, generator=generator)
    return weight.to(dtype), states.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("weight_size", "states_size"),
    [(1, 1), (1, 1e-10), (1, 1e-25), (1e-21, 1e10), (1, 1e17), (1e10, 1e17), (1e-10, 1e36)],
)
def test_numbers_of_any_size(dtype: torch.dtype, weight_size: float, states_size: float) -> None:
    """Squares of tiny numbers underflow to zero; sums of large ones overflow."""
    weight, states = near_ties(dtype)
    form, states = screened(weight * weight_size), states * states_size
    some = [row for row in states.split(1) if form.best(row) is not None]
    for row in some:
        check(form, row)
    assert len(some) == (60 if weight_size == 1 and 1e-12 < states_size < 1e18 else 0)


def worst_case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight and states whose best output, 50, has a score that is off by its margin.

    The score of output 2000 is off by as much in the other direction. In bfloat16, the sum of
    output 50 is below that of output 2000, and both round to -129.
    """
    count = 259
    weight = torch.full((OUTPUTS, count + 2), -2.0)
    # A scale of 1, an input for small steps, and errors of almost a half.
    weight[[50, 2000], 0] = 127
    weight[[50, 2000], 1] = torch.tensor([1.0, 7.0])
    weight[50, 2:], weight[2000, 2:] = -0.50390625, -0.498046875
    weight[50, -1 if dtype == torch.bfloat16 else -2 :] = 0.498046875
    states = torch.tensor([[0, 0.0625] + [1] * count])
    return weight.to(dtype), states.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_as_large_as_margins(dtype: torch.dtype) -> None:
    weight, states = worst_case(dtype)
    form = screened(weight)
    whole = packed_linear(states, form.exact)[0]
    assert whole.argmax() == 50
    assert (whole[50] == whole[2000]) == (dtype == torch.bfloat16)
    assert check(form, states).item() < OUTPUTS / 8
    # Negative control: margins that are slightly too small.
    best = replace(form, margins=form.margins * 0.99).best(states)
    assert best is not None
    assert best.argmax() == 2000


def test_sums_that_differ_by_their_rounding_alone() -> None:
    """The weight has no error in 8 bits."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 128, (INPUTS,), generator=generator)
    weight = torch.full((OUTPUTS, INPUTS), -1.27)
    for output in range(0, OUTPUTS, 300):
        weight[output] = codes[torch.randperm(INPUTS, generator=generator)] * 0.01
    form = screened(weight)
    for state in torch.rand(50, generator=generator).tolist():
        check(form, torch.full((1, INPUTS), state))


def test_without_margins_another_output_is_taken() -> None:
    """Negative control: scores without margins give wrong outputs."""
    weight, states = near_ties(torch.float32)
    form = screened(weight)
    broken = replace(form, margins=torch.zeros(OUTPUTS))
    wrong = 0
    for row in states.split(1):
        check(form, row)
        best = broken.best(row)
        assert best is not None
        wrong += int(best.argmax()) != int(packed_linear(row, form.exact).argmax())
    assert wrong > 0


def test_in_a_process_with_another_default_dtype() -> None:
    before = torch.get_default_dtype()
    weight = weight_of(torch.float32)
    # An output of zeros.
    weight[3] = 0
    torch.set_default_dtype(torch.float64)
    try:
        check(screened(weight), torch.randn(2, weight.shape[1], dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)


def test_the_weight_is_left_as_it_was() -> None:
    weight = weight_of(torch.float32)
    before = weight.clone()
    screened(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_computed_whole(value: float) -> None:
    weight = weight_of(torch.float32)
    states = torch.randn(2, INPUTS)
    states[1, 3] = value
    assert screened(weight).best(states) is None
    weight[17, 0] = value
    assert screened(weight).best(torch.randn(2, INPUTS)) is None


def test_where_nearly_all_are_equal_all_are_computed() -> None:
    weight = torch.ones(OUTPUTS, INPUTS)
    assert screened(weight).best(torch.ones(1, INPUTS)) is None


def test_zeros() -> None:
    weight = weight_of(torch.float32)
    weight[3:9] = 0
    form = screened(weight)
    check(form, weight[100:101])
    assert form.best(torch.zeros(1, INPUTS)) is None


def test_rows_are_chosen_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(10.0, 1.0), (10.0, 7.0), (10.0, 9.0)])
    monkeypatch.setattr(
        "hf_spec.backend.cpu.screened_weight.fastest_seconds", lambda *_: next(seconds)
    )
    form = screened(weight_of(torch.float32))
    assert form.most_rows == 0
    assert timed(form, torch.randn(3, INPUTS)).most_rows == 2
    assert form.nbytes > OUTPUTS * INPUTS
