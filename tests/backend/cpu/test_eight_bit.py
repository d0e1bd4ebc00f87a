"""8-bit layers of bitsandbytes and torchao: the same results, with weights read in place."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hf_spec_kernels import launches
from torch import Tensor, nn

from hf_spec.backend.cpu.eight_bit import (
    MAX_ROWS,
    eight_bit_forward,
    eight_bit_weight,
    is_eight_bit,
)
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from tests.compiler import needs_compiler

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
INPUTS, OUTPUTS = 192, 33
ROWS = (*range(1, 18), MAX_ROWS)


def sizes() -> Tensor:
    """Return factors that give the outputs different scales."""
    return 1 + torch.arange(OUTPUTS)[:, None] % 5


def dynamic(threshold: float = 6.0, bias: bool = True, inputs: int = INPUTS) -> Any:
    """Return a bitsandbytes layer after its first call."""
    bnb = pytest.importorskip("bitsandbytes")
    # The layers log in every call that they cast their inputs.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    torch.manual_seed(0)
    options = {"has_fp16_weights": False, "threshold": threshold, "bias": bias}
    linear = bnb.nn.Linear8bitLt(inputs, OUTPUTS, **options)
    with torch.no_grad():
        linear.weight *= sizes()
        linear = linear.to("cpu").eval()
        linear(torch.zeros(1, inputs))
    return linear


def weight_only(dtype: torch.dtype = torch.float32, bias: bool = True, **options: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=bias).to(dtype).requires_grad_(False)
    linear.weight *= sizes()
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig(**options))
    return linear


def states(rows: int, dtype: torch.dtype = torch.float32, inputs: int = INPUTS) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, rows, inputs, generator=generator).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_bitsandbytes(dtype: torch.dtype, bias: bool) -> None:
    linear = dynamic(bias=bias)
    for rows in ROWS:
        inputs = states(rows, dtype)
        # bitsandbytes casts the bias in its first call with inputs of another dtype.
        expected, found = linear(inputs), eight_bit_forward(linear, inputs)
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_are_those_of_one_row(dtype: torch.dtype) -> None:
    """bitsandbytes applies the outliers of one row to all rows; the kernel does not."""
    linear, inputs = dynamic(threshold=2.0, bias=False), states(5, dtype)
    found = eight_bit_forward(linear, inputs)
    assert found is not None
    alone = torch.cat([linear(row[None, None]) for row in inputs[0]], 1)
    # Products of outliers are summed in a different order, and rounded once.
    bits = max(1e-6, 2 * torch.finfo(dtype).eps)
    assert (found - alone).abs().max() <= bits * alone.abs().max()
    together = linear(inputs)
    assert (found - together).abs().max() > 1e-3 * together.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_only_results_are_those_of_torchao(dtype: torch.dtype, bias: bool) -> None:
    linear = weight_only(dtype, bias)
    assert is_eight_bit(linear)
    for rows in ROWS:
        inputs = states(rows, dtype)
        found, expected = eight_bit_forward(linear, inputs), linear(inputs)
        assert found is not None
        assert found.dtype == dtype
        # Rounding of a sum and of its scaled value, or of a sum in float32.
        bits = max(1e-6, 2 * torch.finfo(dtype).eps)
        assert (found - expected).abs().max() <= bits * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("make", [dynamic, weight_only])
def test_a_scale_of_the_next_output_is_caught(make: Any) -> None:
    linear, inputs = make(), states(3)
    expected = linear(inputs)
    scales = linear.state.SCB if make is dynamic else linear.weight.scale
    scales.copy_(scales.roll(1, 0))
    found = eight_bit_forward(linear, inputs)
    assert found is not None
    assert (found - expected).norm() > 0.01 * expected.norm()


@torch.no_grad()
def test_other_calls_are_left_to_the_libraries() -> None:
    linear = dynamic()
    for rows in (0, MAX_ROWS + 1):
        assert eight_bit_forward(linear, states(rows)) is None
    assert eight_bit_forward(linear, states(1).half()) is None
    assert eight_bit_forward(linear, states(1), prompt=True) is None
    assert eight_bit_forward(linear.train(), states(1)) is None
    cast = dynamic()
    assert eight_bit_forward(cast, states(1, torch.bfloat16)) is None
    cast(states(1, torch.bfloat16))
    assert eight_bit_forward(cast, states(1, torch.bfloat16)) is not None


@torch.no_grad()
def test_compiled_layers_read_the_storage_of_bitsandbytes() -> None:
    linear = dynamic(threshold=2.5)
    dtype = torch.bfloat16
    assert eight_bit_weight(linear, dtype, 1) is None, "its bias is in float32"
    linear(states(1, dtype))
    weight = eight_bit_weight(linear, dtype, MAX_ROWS)
    assert weight is not None
    assert weight.codes is linear.state.CB
    assert weight.scales is linear.state.SCB
    assert weight.threshold == 2.5
    assert eight_bit_weight(linear, dtype, MAX_ROWS + 1) is None
    assert eight_bit_weight(linear, dtype, 1, prompt=True) is None
    assert eight_bit_weight(linear.train(), dtype, 1) is None
    assert eight_bit_weight(dynamic(), torch.float32, 1) is None


def test_a_weight_is_left_to_bitsandbytes_until_its_first_call() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear8bitLt(INPUTS, OUTPUTS, has_fp16_weights=False).to("cpu").eval()
    assert is_eight_bit(linear)
    assert eight_bit_forward(linear, states(1)) is None


def test_other_layers_are_not_ours() -> None:
    assert not is_eight_bit(nn.Linear(INPUTS, OUTPUTS))
    assert not is_eight_bit(dynamic(inputs=96))


def test_other_settings_of_torchao_are_not_ours() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    assert not is_eight_bit(weight_only(granularity=quantization.PerGroup(64)))
    linear = nn.Linear(INPUTS, OUTPUTS).requires_grad_(False)
    quantization.quantize_(linear, quantization.Int8DynamicActivationInt8WeightConfig())
    assert not is_eight_bit(linear)


@torch.no_grad()
@pytest.mark.parametrize("make", [dynamic, weight_only])
def test_the_kernel_runs_in_decoding_steps_only(make: Any) -> None:
    linear, inputs = make(), states(3)
    expected, ran = linear(inputs), launches["eight_bit_linear"]
    with install_packed_linears(linear):
        linear(inputs)
        assert launches["eight_bit_linear"] == ran
        with use_packed_linears():
            found = linear(inputs)
        assert launches["eight_bit_linear"] == ran + 1
        with use_packed_linears(prompt=True):
            linear(inputs)
        assert launches["eight_bit_linear"] == ran + 1 + (make is weight_only)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    linear(inputs)
    assert launches["eight_bit_linear"] <= ran + 2
