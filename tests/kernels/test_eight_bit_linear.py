"""Linear layers with 8-bit weights: weight-only sums up to rounding, and exact integers."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from hf_spec_kernels import eight_bit_linear, launches
from hf_spec_kernels.eight_bit_linear import dynamic_linear, weight_only_linear
from torch import Tensor

from tests.compiler import built_for, needs_compiler

pytestmark = needs_compiler

# Below, at and above the row group sizes of every processor.
ROWS = (*range(18), 24, 25, 64)
# Outputs and inputs; an even and an odd number of outputs.
SHAPES = [(1, 64), (33, 192), (64, 128)]
DTYPES = [torch.float32, torch.bfloat16]
# Rounding of float32 sums, or of a sum and its scaled value, relative to the largest result.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
TERM_ROUNDING = {torch.float32: 4e-7, torch.bfloat16: 5e-3}
THRESHOLD = 2.5


def weight(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return codes, including the smallest and the largest, and scales."""
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    codes[0, :2] = torch.tensor([-128, 127])
    return codes, 1 + torch.rand(shape[0], generator=generator)


def states(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest result."""
    if not wanted.numel():
        return 0.0
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_only_results_are_exact_up_to_rounding(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in SHAPES:
            codes, scales = weight(shape)
            for rows in ROWS:
                inputs = states(rows, shape[1], dtype)
                weights = codes.double() * scales.double()[:, None]
                exact = inputs.double() @ weights.T
                # Terms may cancel, so limits are relative to the sum of their absolute values.
                limits = TERM_ROUNDING[dtype] * (inputs.double().abs() @ weights.abs().T)
                for impl in ("auto", "torch"):
                    found = weight_only_linear(inputs, codes, scales, impl)
                    assert found.dtype == dtype
                    assert bool(((found.double() - exact).abs() <= limits).all())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dynamic_results_have_the_bits_of_the_reference(dtype: torch.dtype, has_bias: bool) -> None:
    for shape in SHAPES:
        codes, scales = weight(shape)
        bias = states(1, shape[0], dtype)[0] if has_bias else None
        for rows in ROWS:
            inputs = states(rows, shape[1], dtype)
            inputs[rows // 2 :, 3:5] *= 0
            found, wanted = (
                dynamic_linear(inputs, codes, scales, bias, 0.0, impl) for impl in ("auto", "torch")
            )
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_are_rounded_to_float16_first(dtype: torch.dtype) -> None:
    """Covers subnormal numbers, ties, and the largest numbers."""
    codes, scales = weight((33, 192))
    for size in (1e-9, 3e-8, 1e-7, 2e-6, 6e-5, 1e-3, 1.0, 1e4):
        inputs = states(4, 192, dtype) * size
        inputs[1] = torch.arange(192) * 2.0**-25
        # The largest bfloat16 number that is finite in float16 is 65280.
        largest = 65519.0 if dtype == torch.float32 else 65280.0
        inputs[2, :4] = torch.tensor([largest, -largest, 2.0**-14, 2049.0])
        inputs[3] = 1 + torch.arange(192) * 2.0**-11
        found, wanted = (
            dynamic_linear(inputs, codes, scales, None, 0.0, impl) for impl in ("auto", "torch")
        )
        assert torch.equal(found, wanted)


def test_inputs_that_are_infinite_in_float16_are_outliers() -> None:
    codes, scales = weight((33, 192))
    inputs = states(2, 192, torch.float32)
    inputs[1, 5] = 65520.0
    found, wanted = (
        dynamic_linear(inputs, codes, scales, None, 6e4, impl) for impl in ("auto", "torch")
    )
    assert wanted.isfinite().all()
    assert off(found, wanted) <= ROUNDING[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_are_not_quantized(dtype: torch.dtype) -> None:
    codes, scales = weight((33, 192))
    inputs = states(9, 192, dtype)
    inputs[3] = 0
    inputs[4] *= 100
    assert bool((inputs.abs() >= THRESHOLD).any())
    found, wanted, quantized = (
        dynamic_linear(inputs, codes, scales, None, *settings)
        for settings in ((THRESHOLD,), (THRESHOLD, "torch"), (0.0,))
    )
    assert off(found, wanted) <= ROUNDING[dtype]
    assert off(quantized, wanted) > 1e-3 > ROUNDING[torch.float32]


@pytest.mark.parametrize("threshold", [0.0, THRESHOLD])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, threshold: float) -> None:
    codes, scales = weight((33, 192))
    inputs = states(64, 192, dtype)
    whole = dynamic_linear(inputs, codes, scales, None, threshold)
    only = weight_only_linear(inputs, codes, scales)
    for rows in ROWS:
        part = inputs[:rows]
        assert torch.equal(dynamic_linear(part, codes, scales, None, threshold), whole[:rows])
        assert torch.equal(weight_only_linear(part, codes, scales), only[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broken_weights_are_caught(dtype: torch.dtype) -> None:
    codes, scales = weight((33, 192))
    inputs = states(5, 192, dtype)
    for linear in (weight_only_linear, dynamic_linear):
        whole = linear(inputs, codes, scales)
        assert off(linear(inputs, codes, scales.roll(1)), whole) > 10 * ROUNDING[dtype]
        assert off(linear(inputs, codes.roll(1, 1), scales), whole) > 10 * ROUNDING[dtype]


# GCC name of a processor -> flag that this processor must have.
PROCESSORS = {
    "x86-64": "sse2",
    "haswell": "avx2",
    "skylake-avx512": "avx512f",
    "cascadelake": "avx512_vnni",
}


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors_compute_the_same(processor: str) -> None:
    if PROCESSORS[processor] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {PROCESSORS[processor]}")
    codes, scales = weight((33, 192))
    with built_for(processor, eight_bit_linear.build):
        for dtype in DTYPES:
            inputs = states(17, 192, dtype)
            found = dynamic_linear(inputs, codes, scales)
            assert torch.equal(found, dynamic_linear(inputs, codes, scales, impl="torch"))
            only = weight_only_linear(inputs, codes, scales)
            wanted = weight_only_linear(inputs, codes, scales, "torch")
            assert off(only, wanted) <= ROUNDING[dtype]
            alone = [weight_only_linear(row[None], codes, scales) for row in inputs]
            assert torch.equal(only, torch.cat(alone))


def test_any_strides_and_dimensions() -> None:
    codes, scales = weight((2, 64))
    for inputs in (
        states(1, 64, torch.float32)[0],
        states(6, 64, torch.float32).view(2, 3, 64),
        states(64, 5, torch.float32).T,
    ):
        rows = inputs.reshape(-1, 64).contiguous()
        for linear in (weight_only_linear, dynamic_linear):
            expected = linear(rows, codes, scales).view(*inputs.shape[:-1], 2)
            assert torch.equal(linear(inputs, codes, scales), expected)


def test_a_launch_is_counted() -> None:
    (codes, scales), inputs = weight((2, 64)), states(1, 64, torch.float32)
    before = launches["eight_bit_linear"]
    weight_only_linear(inputs, codes, scales)
    dynamic_linear(inputs, codes, scales)
    dynamic_linear(inputs, codes, scales, impl="torch")
    assert launches["eight_bit_linear"] == before + 2


def test_tensors_that_do_not_fit_raise() -> None:
    (codes, scales), inputs = weight((6, 128)), states(1, 128, torch.float32)
    for arguments in (
        (inputs[:, :64], codes, scales),
        (inputs[:, :96], codes[:, :96].contiguous(), scales),
        (inputs, codes, scales[1:]),
        (inputs, codes.T.contiguous().T, scales),
    ):
        for linear in (weight_only_linear, dynamic_linear):
            with pytest.raises(ValueError, match="K must be a multiple of 64"):
                linear(*arguments)
    with pytest.raises(TypeError, match="int8 codes, and float32 scales"):
        weight_only_linear(inputs, codes.int(), scales)
    with pytest.raises(TypeError, match="states in float32 or bfloat16"):
        dynamic_linear(inputs.half(), codes, scales)
    with pytest.raises(ValueError, match="a bias of"):
        dynamic_linear(inputs, codes, scales, scales[1:])
    with pytest.raises(ValueError, match="choose auto, torch"):
        dynamic_linear(inputs, codes, scales, impl="triton")
