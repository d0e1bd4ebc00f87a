"""Linear layers with 4-bit weights in row-major storage: exact weights, sums up to rounding."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_spec_kernels import launches
from hf_spec_kernels.four_bit_linear import row_major
from hf_spec_kernels.four_bit_linear.row_major import (
    NestedScales,
    RowMajorWeight,
    row_major_four_bit_linear,
)
from torch import Tensor

from tests.compiler import built_for, needs_compiler

pytestmark = needs_compiler

# Below, at and above the row group sizes of every processor.
ROWS = (*range(18), 24, 25, 64)
# Outputs, inputs, inputs per scale; an even and an odd number of outputs.
SHAPES = [(1, 32, 32), (2, 64, 64), (33, 192, 64), (64, 96, 32), (17, 512, 256)]
DTYPES = [torch.float32, torch.bfloat16]
# Sums in float32 of up to 512 products, relative to the largest sum.
ROUNDING = 1e-6


def weight(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, nested: bool = False
) -> RowMajorWeight:
    outputs, inputs, block = shape
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    count = outputs * inputs // block
    scales: Tensor | NestedScales = 1 + torch.rand(count, generator=generator)
    if nested:
        scales = NestedScales(
            torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8),
            torch.rand(256, generator=generator),
            1 + torch.rand(-(-count // 256), generator=generator),
            torch.tensor(0.7),
        )
    return RowMajorWeight(codes, scales, torch.randn(16, generator=generator), block, dtype)


def states(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))


def off(found: Tensor, inputs: Tensor, read: RowMajorWeight) -> float:
    """Return the distance from float64 sums, relative to the largest sum."""
    exact = inputs.double() @ read.dequantized().double().T
    return float((found - exact).abs().max() / exact.abs().max()) if len(inputs) else 0.0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_exact_up_to_rounding(dtype: torch.dtype, nested: bool, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in SHAPES:
            read = weight(shape, dtype, nested)
            for rows in ROWS:
                inputs = states(rows, shape[1])
                for impl in ("auto", "torch"):
                    found = row_major_four_bit_linear(inputs, read, impl)
                    assert found.shape == (rows, shape[0])
                    assert off(found, inputs, read) <= ROUNDING
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantized_weights_are_those_of_the_reference(dtype: torch.dtype, nested: bool) -> None:
    """The inputs are an identity matrix, whose products are exact."""
    for shape in (*SHAPES, (40, 512, 32)):
        read = weight(shape, dtype, nested)
        columns = row_major_four_bit_linear(torch.eye(shape[1]), read)
        assert torch.equal(columns.T, read.dequantized().float())


def test_the_reference_reads_the_documented_storage() -> None:
    read = weight((3, 64, 32), torch.bfloat16)
    whole = read.dequantized()
    assert isinstance(read.scales, Tensor)
    for n in range(3):
        for k in range(64):
            byte = int(read.codes[n, k // 2])
            code = byte & 15 if k % 2 else byte >> 4
            scale = read.scales[2 * n + k // 32]
            assert whole[n, k] == (read.table[code] * scale).bfloat16()


def test_nested_scales_are_read_in_blocks_of_256() -> None:
    nested = weight((300, 32, 32), nested=True).scales
    assert isinstance(nested, NestedScales)
    scales = nested.dequantized()
    for i in (0, 255, 256, 299):
        code = int(nested.codes[i])
        assert scales[i] == nested.table[code] * nested.absmax[i // 256] + nested.offset


def test_broken_weights_are_caught() -> None:
    read, inputs = weight((33, 192, 64)), states(5, 192)
    nested = weight((33, 192, 64), nested=True)
    assert isinstance(read.scales, Tensor)
    assert isinstance(nested.scales, NestedScales)
    shifted = replace(read, scales=read.scales.roll(1, 0))
    swapped = replace(read, codes=read.codes >> 4 | read.codes << 4)
    without = replace(nested, scales=replace(nested.scales, offset=torch.tensor(0.0)))
    for broken, whole in ((shifted, read), (swapped, read), (without, nested)):
        assert off(row_major_four_bit_linear(inputs, broken), inputs, whole) > 1000 * ROUNDING


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    read, inputs = weight((33, 192, 64), dtype), states(64, 192)
    whole = row_major_four_bit_linear(inputs, read)
    for rows in ROWS:
        assert torch.equal(row_major_four_bit_linear(inputs[:rows], read), whole[:rows])


def test_any_strides_and_dimensions() -> None:
    read = weight((2, 64, 64))
    for inputs in (states(1, 64)[0], states(6, 64).view(2, 3, 64), states(64, 5).T):
        rows = inputs.reshape(-1, 64).contiguous()
        expected = row_major_four_bit_linear(rows, read).view(*inputs.shape[:-1], 2)
        assert torch.equal(row_major_four_bit_linear(inputs, read), expected)


# GCC name of a processor -> flag that this processor must have.
PROCESSORS = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512f"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors_compute_the_same(processor: str) -> None:
    if PROCESSORS[processor] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {PROCESSORS[processor]}")
    with built_for(processor, row_major.build):
        for dtype in DTYPES:
            for nested in (False, True):
                read = weight((33, 192, 64), dtype, nested)
                columns = row_major_four_bit_linear(torch.eye(192), read)
                assert torch.equal(columns.T, read.dequantized().float())
                inputs = states(17, 192)
                found = row_major_four_bit_linear(inputs, read)
                assert off(found, inputs, read) <= ROUNDING
                alone = [row_major_four_bit_linear(row[None], read) for row in inputs]
                assert torch.equal(found, torch.cat(alone))


def test_a_launch_is_counted() -> None:
    before = launches["four_bit_linear"]
    row_major_four_bit_linear(states(1, 64), weight((2, 64, 64)))
    row_major_four_bit_linear(states(1, 64), weight((2, 64, 64)), "torch")
    assert launches["four_bit_linear"] == before + 1


def test_tensors_that_do_not_fit_raise() -> None:
    read, inputs = weight((6, 64, 32)), states(1, 64)
    nested = weight((6, 64, 32), nested=True)
    assert isinstance(read.scales, Tensor)
    assert isinstance(nested.scales, NestedScales)
    for broken in (
        replace(read, block_size=0),
        replace(read, block_size=16, scales=read.scales.repeat(2)),
        replace(read, block_size=128, scales=read.scales[:3]),
        replace(read, scales=read.scales[:-1]),
        replace(read, table=read.table[:8]),
        replace(read, codes=read.codes.T.contiguous().T),
        replace(nested, scales=replace(nested.scales, codes=nested.scales.codes[1:])),
        replace(nested, scales=replace(nested.scales, table=nested.scales.table[1:])),
        replace(nested, scales=replace(nested.scales, absmax=nested.scales.absmax[1:])),
    ):
        with pytest.raises(ValueError, match="K must be a multiple of the block"):
            row_major_four_bit_linear(inputs, broken)
    with pytest.raises(ValueError, match="states of width 32"):
        row_major_four_bit_linear(inputs[:, :32], read)
    with pytest.raises(ValueError, match="choose auto, torch"):
        row_major_four_bit_linear(inputs, read, impl="triton")


def test_other_dtypes_raise() -> None:
    read, inputs = weight((6, 64, 32)), states(1, 64)
    with pytest.raises(TypeError, match=r"states, scales and table must be torch\.float32"):
        row_major_four_bit_linear(inputs.bfloat16(), read)
    with pytest.raises(TypeError, match=r"codes must be torch\.uint8"):
        row_major_four_bit_linear(inputs, replace(read, codes=read.codes.char()))
    with pytest.raises(TypeError, match=r"torch\.float16; the kernel takes float32, bfloat16"):
        row_major_four_bit_linear(inputs, replace(read, dtype=torch.float16))
