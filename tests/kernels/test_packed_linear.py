"""Linear layers with packed weights: results of `F.linear`, with the same bits in every batch."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_spec_kernels import launches
from hf_spec_kernels import packed_linear as packed_linear_module
from hf_spec_kernels.packed_linear import PackedWeight, pack_weight, packed_linear
from torch import Tensor
from torch.nn import functional as F

from tests.compiler import built_for, needs_compiler

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
# Below, at and above the sizes of blocks and row groups of every processor.
OUTPUTS = (1, 7, 32, 33, 100)
ROWS = (0, 1, 2, 6, 7, 13, 14, 15, 29, 64)
# Also the numbers of rows of long prompts.
MANY_ROWS = (*ROWS, 16, 17, 33, 100, 257)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_outputs", OUTPUTS)
@pytest.mark.parametrize("num_inputs", [1, 5, 96])
def test_results_are_those_of_linear(
    dtype: torch.dtype, num_outputs: int, num_inputs: int, threads: int
) -> None:
    weight, bias = numbers(num_outputs, num_inputs, dtype=dtype), numbers(num_outputs, dtype=dtype)
    packed = pack_weight(weight)
    for rows in ROWS:
        states = numbers(rows, num_inputs, dtype=dtype, seed=rows + 1)
        for added in (None, bias):
            # float64 sums rounded once; sums in float32 equal them up to their last bits.
            wide = None if added is None else added.double()
            expected = F.linear(states.double(), weight.double(), wide).to(dtype)
            found = packed_linear(states, packed, added)
            close = {torch.float32: 2e-5, torch.bfloat16: 0.02}[dtype]
            torch.testing.assert_close(found, expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_one_result_in_every_batch(dtype: torch.dtype, threads: int) -> None:
    packed = pack_weight(numbers(100, 300, dtype=dtype))
    states = numbers(max(MANY_ROWS), 300, dtype=dtype)
    alone = torch.cat([packed_linear(row[None], packed) for row in states])
    for rows in MANY_ROWS:
        assert torch.equal(packed_linear(states[:rows], packed), alone[:rows])


def test_a_weight_of_many_blocks_is_read_in_parts(threads: int) -> None:
    """Each part stays in the CPU cache while all rows are multiplied."""
    weight, states = numbers(1100, 700).bfloat16(), numbers(70, 700).bfloat16()
    packed = pack_weight(weight)
    found = packed_linear(states, packed)
    expected = F.linear(states.double(), weight.double()).bfloat16()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)
    assert torch.equal(packed_linear(states[3:4], packed), found[3:4])


def test_the_reference_is_what_the_kernel_computes() -> None:
    packed, bias, states = pack_weight(numbers(70, 30)), numbers(70), numbers(3, 4, 30)
    before = launches["packed_linear"]
    expected = packed_linear(states, packed, bias, impl="torch")
    assert launches["packed_linear"] == before
    torch.testing.assert_close(packed_linear(states, packed, bias), expected)
    assert launches["packed_linear"] == before + 1


@pytest.mark.parametrize("rows", ROWS)
def test_states_in_float32_meet_weights_in_bfloat16(rows: int) -> None:
    weight, bias, states = numbers(70, 31).bfloat16(), numbers(70), numbers(rows, 31)
    packed = pack_weight(weight, torch.float32)
    assert packed.nbytes < 0.6 * pack_weight(weight.float()).nbytes
    assert torch.equal(packed.unpacked(), weight)
    found, expected = packed_linear(states, packed, bias), F.linear(states, weight.float(), bias)
    assert found.dtype == torch.float32
    # Sums of 31 products of about 1; the states may be rounded.
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.05)
    reference = packed_linear(states, packed, bias, impl="torch")
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
    alone = [packed_linear(row[None], packed, bias) for row in states]
    assert torch.equal(found, torch.cat([found[:0], *alone]))
    with pytest.raises(TypeError, match=r"bfloat16 on cpu with a weight for torch\.float32"):
        packed_linear(states.bfloat16(), packed)
    with pytest.raises(TypeError, match=r"float32 on cpu for states of torch\.bfloat16"):
        pack_weight(weight.float(), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_keeps_every_weight(dtype: torch.dtype) -> None:
    weight = numbers(100, 30, dtype=dtype)
    packed = pack_weight(weight)
    assert torch.equal(packed.unpacked(), weight)
    assert packed.nbytes == packed.blocks.nbytes >= weight.nbytes
    assert torch.equal(pack_weight(weight.T.contiguous().T).blocks, packed.blocks)


def test_states_may_have_any_strides() -> None:
    packed = pack_weight(numbers(33, 20))
    for states in (
        numbers(20),
        numbers(20, 5).T,
        numbers(4, 40)[:, ::2],
        numbers(1, 20).expand(3, 20),
    ):
        expected = F.linear(states, packed.unpacked())
        found = packed_linear(states, packed)
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none_and_in_its_row(dtype: torch.dtype) -> None:
    states, packed = numbers(3, 20, dtype=dtype), pack_weight(torch.ones(33, 20, dtype=dtype))
    states[1, 4], states[2, 4] = math.nan, math.inf
    found = packed_linear(states, packed)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert (found[2] == math.inf).all()


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    """Covers values between two neighbors: below, at and above the midpoint."""
    low = torch.arange(0x3F80, 0x3F90, dtype=torch.int32) << 16
    wide = (low[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).view(-1)
    value = wide.to(torch.int32).view(torch.float32)
    # Two exact bfloat16 summands: the upper bits and the rest.
    upper = value.bfloat16().float()
    parts = [upper.bfloat16(), (value - upper).bfloat16()]
    exact = parts[0].float() + parts[1].float()
    states = torch.stack(parts, dim=1)
    found = packed_linear(states, pack_weight(torch.ones(1, 2, dtype=torch.bfloat16)))
    assert torch.equal(found[:, 0], exact.bfloat16())


@pytest.mark.parametrize(
    ("states", "bias", "error", "message"),
    [
        (numbers(2, 8, dtype=torch.bfloat16), None, TypeError, "states of torch.bfloat16"),
        (numbers(2, 9), None, ValueError, "width 9 with a weight of 8 inputs"),
        (torch.empty(2, 8, device="meta"), None, TypeError, "on meta"),
        (numbers(2, 8), numbers(6), ValueError, r"a bias of torch.float32, \(6,\)"),
        (numbers(2, 8), numbers(5).double(), ValueError, "a bias of torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(
    states: Tensor, bias: Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        packed_linear(states, pack_weight(numbers(5, 8)), bias)


def test_other_weights_and_implementations_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"torch\.float64 on cpu for states of torch\.float64; the kernel takes"
    ):
        pack_weight(numbers(5, 8).double())
    with pytest.raises(TypeError, match="on meta"):
        pack_weight(torch.empty(5, 8, device="meta"))
    with pytest.raises(ValueError, match="impl='triton'; choose auto, torch"):
        packed_linear(
            numbers(2, 8), PackedWeight(numbers(1, 8, 32, 1), 5, 8, torch.float32), impl="triton"
        )


# GCC name of a processor -> flag that this processor must have, and outputs per block.
PROCESSORS = {"x86-64": ("sse2", 8), "haswell": ("avx2", 16), "cooperlake": ("avx512_bf16", 32)}


@pytest.mark.by_default(
    processor=("x86-64", "haswell"), dtype=lambda dtype: dtype == torch.bfloat16
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_processors_compute_the_same(processor: str, dtype: torch.dtype) -> None:
    """Covers narrower registers, and processors without tiles or bfloat16 instructions."""
    needed, size = PROCESSORS[processor]
    if needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needed}")
    states, weight = numbers(20, 97, dtype=dtype), numbers(70, 97, dtype=dtype)
    expected = packed_linear(states, pack_weight(weight))
    with built_for(processor, packed_linear_module._library):
        packed = pack_weight(weight)
        assert packed.blocks.shape[2] == size
        found = packed_linear(states, packed)
        alone = torch.cat([packed_linear(row[None], packed) for row in states])
        rounded = packed_linear(states.float(), pack_weight(weight.bfloat16(), torch.float32))
    close = {torch.float32: 2e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    assert torch.equal(found, alone)
    assert (rounded - expected).norm() < 0.01 * expected.float().norm()
