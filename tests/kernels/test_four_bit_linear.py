"""Linear layers with 4-bit weights: results of the reference, with the same bits in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_spec_kernels import four_bit_linear as four_bit_module
from hf_spec_kernels import launches
from hf_spec_kernels.four_bit_linear import four_bit_linear
from hf_spec_kernels.four_bit_linear.reference import dequantized
from torch import Tensor

from tests.compiler import built_for, needs_compiler

pytestmark = needs_compiler

# Below, at and above the row group sizes.
ROWS = (*range(18), 24, 25, 64)
# Outputs, inputs, inputs per scale.
SHAPES = [(32, 2, 2), (32, 64, 64), (96, 192, 64), (64, 96, 32), (160, 512, 256)]


def weight(outputs: int, inputs: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = 1 + torch.rand(inputs // block, outputs, generator=generator)
    table = torch.randn(16, generator=generator)
    return codes, scales.bfloat16(), table.bfloat16()


def states(rows: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inputs, generator=generator).bfloat16()


def off(found: Tensor, inputs: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the distance from float64 sums that are rounded once, relative to the largest sum."""
    exact = inputs.double() @ dequantized(*parts).double().T
    return float((found - exact.bfloat16()).abs().max() / exact.abs().max()) if len(inputs) else 0.0


# A value rounded in the other direction differs by 1/256.
ROUNDING = 2**-8


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_exact_up_to_rounding(shape: tuple[int, int, int], threads: int) -> None:
    parts, before = weight(*shape), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in ROWS:
            inputs = states(rows, shape[1])
            for impl in ("auto", "torch"):
                found = four_bit_linear(inputs, *parts, impl=impl)
                assert found.shape == (rows, shape[0])
                assert off(found, inputs, parts) <= ROUNDING
    finally:
        torch.set_num_threads(before)


def test_a_scale_of_the_next_block_is_caught() -> None:
    codes, scales, table = weight(96, 192, 64)
    inputs = states(5, 192)
    broken = four_bit_linear(inputs, codes, scales.roll(1, 0), table)
    assert off(broken, inputs, (codes, scales, table)) > 10 * ROUNDING


def test_codes_of_the_other_half_are_caught() -> None:
    codes, scales, table = weight(96, 192, 64)
    inputs = states(5, 192)
    swapped = codes >> 4 | codes << 4
    broken = four_bit_linear(inputs, swapped, scales, table)
    assert off(broken, inputs, (codes, scales, table)) > 10 * ROUNDING


def test_the_reference_reads_the_documented_layout() -> None:
    """The layout of weights (n, k) has 32 bytes for every pair of inputs of 32 outputs."""
    codes, scales, table = weight(64, 6, 2)
    whole = dequantized(codes, scales, table)
    for n in (0, 15, 16, 31, 32, 63):
        for k in range(6):
            byte = int(codes.view(2, 3, 32)[n // 32, k // 2, 2 * (n % 16) + k % 2])
            code = byte >> 4 if n % 32 >= 16 else byte & 15
            assert whole[n, k] == table[code].float() * scales[k // 2, n].float()


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    parts, inputs = weight(96, 192, 64), states(64, 192)
    whole = four_bit_linear(inputs, *parts)
    for rows in ROWS:
        assert torch.equal(four_bit_linear(inputs[:rows], *parts), whole[:rows])


def test_any_strides_and_dimensions() -> None:
    parts = weight(32, 64, 64)
    for inputs in (states(1, 64)[0], states(6, 64).view(2, 3, 64), states(64, 5).T):
        rows = inputs.reshape(-1, 64).contiguous()
        expected = four_bit_linear(rows, *parts).view(*inputs.shape[:-1], 32)
        assert torch.equal(four_bit_linear(inputs, *parts), expected)


def test_portable_code_computes_the_same() -> None:
    parts, inputs = weight(96, 192, 64), states(17, 192)
    with built_for("x86-64", four_bit_module.build):
        assert off(four_bit_linear(inputs, *parts), inputs, parts) <= ROUNDING


def test_processors_without_tiles_compute_the_same() -> None:
    parts, inputs = weight(96, 192, 64), states(64, 192)
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX512-BF16")
    with built_for("cooperlake", four_bit_module.build):
        whole = four_bit_linear(inputs, *parts)
        assert off(whole, inputs, parts) <= ROUNDING
        for rows in ROWS:
            assert torch.equal(four_bit_linear(inputs[:rows], *parts), whole[:rows])


def test_a_launch_is_counted() -> None:
    before = launches["four_bit_linear"]
    four_bit_linear(states(1, 64), *weight(32, 64, 64))
    assert launches["four_bit_linear"] == before + 1


@pytest.mark.parametrize("shape", [(33, 64, 64), (31, 64, 64)], ids=str)
def test_shapes_that_do_not_fit_raise(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        four_bit_linear(states(1, shape[1]), *weight(*shape))


def test_tensors_that_do_not_fit_raise() -> None:
    codes, scales, table = weight(32, 64, 32)
    inputs = states(1, 64)
    for broken in (
        (inputs[:, :32], codes, scales, table),
        (inputs, codes, scales[:, :16], table),
        (inputs, codes, scales, table[:8]),
        (inputs, codes.T.contiguous().T, scales, table),
    ):
        with pytest.raises(ValueError, match="states of width"):
            four_bit_linear(*broken)
    with pytest.raises(TypeError, match=r"torch\.float32"):
        four_bit_linear(inputs.float(), codes, scales, table)
    with pytest.raises(ValueError, match="choose auto, torch"):
        four_bit_linear(inputs, codes, scales, table, impl="triton")
