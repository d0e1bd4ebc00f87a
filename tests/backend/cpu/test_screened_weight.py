"""The best outputs of a layer are those of the whole layer, by 8-bit scores and exact products."""

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
    """Outputs of different sizes, as of rare and frequent tokens."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    return (weight * torch.rand(OUTPUTS, 1, generator=generator)).to(dtype)


def screened(weight: Tensor) -> ScreenedWeight:
    return screen(weight, pack_weight(weight))


def check(form: ScreenedWeight, states: Tensor) -> Tensor:
    """Compare with all outputs; return how many of each row are computed."""
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
        # States near an output's weight, as those of a model that is sure of a token.
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


def test_without_margins_another_output_is_taken() -> None:
    """A broken twin: scores alone would be wrong."""
    weight = weight_of(torch.float32)
    # A few that are close to each other and far from the rest, in blocks of their own.
    generator = torch.Generator().manual_seed(1)
    weight[::300] = weight[50] * 5 + 0.02 * torch.randn(11, INPUTS, generator=generator)
    states = weight[50] + 0.1 * torch.randn(60, INPUTS, generator=generator)
    form = screened(weight)
    broken = replace(form, margins=torch.zeros(OUTPUTS))
    wrong = 0
    for row in states.split(1):
        check(form, row)
        best = broken.best(row)
        assert best is not None
        wrong += int(best.argmax()) != int(packed_linear(row, form.exact).argmax())
    assert wrong > 0


def test_the_weight_is_left_as_it_was() -> None:
    weight = weight_of(torch.float32)
    before = weight.clone()
    screened(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
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
