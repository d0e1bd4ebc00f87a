"""4-bit layers of bitsandbytes: the same results, with weights read in place."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_spec_kernels import huge_pages, launches
from hf_spec_kernels.four_bit_linear import BuildError, build
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.backend.cpu import four_bit
from hf_spec.backend.cpu.four_bit import MAX_ROWS, four_bit_forward, is_four_bit
from hf_spec.common.logging import log_once
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.evaluation.bench.runner import peak_bytes, reset_peak
from tests.compiler import built_for, needs_compiler

bnb = pytest.importorskip("bitsandbytes")

needs_layout = pytest.mark.skipif(
    not getattr(bnb.nn.Linear4bit(64, 64), "support_avx512bf16_for_cpu", False),
    reason="bitsandbytes has its layout for AVX512-BF16 only",
)
pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROW_MAJOR_DTYPES = [torch.float32, torch.bfloat16]
LAYOUTS = [pytest.param(False, marks=needs_layout, id="interleaved"), pytest.param(True, id="rows")]
INPUTS = 192
EPS = torch.finfo(torch.bfloat16).eps
KINDS = ("nf4", "fp4")


def layer(kind: str = "nf4", nested: bool = False, row_major: bool = False, **options: Any) -> Any:
    """Return a layer of 96 outputs and, by default, 192 inputs after its first call."""
    torch.manual_seed(0)
    options = {"quant_type": kind, "compress_statistics": nested, **options}
    linear = bnb.nn.Linear4bit(options.pop("inputs", INPUTS), 96, **options)
    if row_major:
        # Simulate a processor without AVX512-BF16.
        linear.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        if linear.bias is not None:
            linear.bias.normal_()
        linear.weight.normal_()
    linear = linear.to("cpu").eval()
    with torch.no_grad():
        linear(torch.zeros(1, linear.in_features))
    return linear


def states(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, rows, INPUTS, generator=generator).to(dtype)


@needs_layout
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_bitsandbytes(
    kind: str, nested: bool, compute: torch.dtype | None, dtype: torch.dtype
) -> None:
    linear = layer(kind, nested, compute_dtype=compute)
    # AMX tiles sum in a different order.
    with built_for("cooperlake", build):
        for rows in (*range(1, 18), MAX_ROWS, 300):
            inputs = states(rows, dtype)
            found, expected = four_bit_forward(linear, inputs), linear(inputs)
            assert found is not None
            assert found.dtype == dtype
            assert torch.equal(found, expected)


@needs_layout
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_bitsandbytes_up_to_rounding(
    kind: str, nested: bool, dtype: torch.dtype
) -> None:
    linear = layer(kind, nested, compute_dtype=torch.bfloat16)
    for rows in (*range(1, 18), MAX_ROWS):
        inputs = states(rows, dtype)
        found, expected = four_bit_forward(linear, inputs), linear(inputs)
        assert found is not None
        # Rounding of a sum, and of its sum with the bias.
        assert (found - expected).abs().max() <= 2 * EPS * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("compute", ROW_MAJOR_DTYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_row_major_weights_are_those_of_bitsandbytes(
    storage: torch.dtype, kind: str, nested: bool, compute: torch.dtype
) -> None:
    """The inputs are an identity matrix, whose products are exact."""
    options: dict[str, Any] = {"compute_dtype": compute, "quant_storage": storage}
    linear = layer(kind, nested, row_major=True, bias=False, **options)
    identity = torch.eye(INPUTS).split(MAX_ROWS)
    found = torch.cat([four_bit_forward(linear, part) for part in identity])
    assert torch.equal(found.T, dequantized(linear, compute))


def dequantized(linear: Any, compute: torch.dtype) -> Tensor:
    """Return the weight that bitsandbytes multiplies by, in float32."""
    quantization = linear.weight.quant_state
    quantization.dtype = compute
    return bnb.functional.dequantize_4bit(linear.weight.data, quantization).float()


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", ROW_MAJOR_DTYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_row_major_results_are_those_of_bitsandbytes_up_to_rounding(
    nested: bool, compute: torch.dtype, dtype: torch.dtype
) -> None:
    linear = layer(nested=nested, row_major=True, compute_dtype=compute)
    whole, bias = dequantized(linear, compute).double(), linear.bias.to(compute).double()
    # Precision of the result or of the sum, whichever is lower.
    bits = min(2**-20, *(torch.finfo(t).eps for t in (dtype, compute)), key=lambda eps: -eps)
    for rows in (*range(1, 18), MAX_ROWS):
        inputs = states(rows, dtype)
        exact = F.linear(inputs.to(compute).double(), whole, bias)
        found = four_bit_forward(linear, inputs)
        assert found is not None
        assert found.dtype == dtype
        assert found.shape == exact.shape
        for results in (found, linear(inputs)):
            assert (results - exact).abs().max() <= bits * exact.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("row_major", LAYOUTS)
def test_a_scale_of_the_next_block_is_caught(row_major: bool) -> None:
    linear = layer(row_major=row_major)
    expected = linear(states(3))
    quantization = linear.weight.quant_state
    quantization.absmax = quantization.absmax.roll(1, 0).contiguous()
    found = four_bit_forward(linear, states(3))
    assert found is not None
    assert (found - expected).norm() > 0.01 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("row_major", LAYOUTS)
def test_other_calls_are_left_to_bitsandbytes(row_major: bool) -> None:
    linear = layer(row_major=row_major)
    assert four_bit_forward(linear, states(0)) is None
    # For prompts, the kernel runs only with the layout for AVX512-BF16.
    assert (four_bit_forward(linear, states(MAX_ROWS + 1)) is None) == row_major
    assert four_bit_forward(linear.train(), states(1)) is None


@needs_layout
@torch.no_grad()
def test_a_weight_is_left_to_bitsandbytes_until_it_is_rearranged() -> None:
    fresh = bnb.nn.Linear4bit(INPUTS, 96, compute_dtype=torch.float32).to("cpu").eval()
    assert four_bit_forward(fresh, states(1)) is None
    expected = fresh(states(1))
    found = four_bit_forward(fresh, states(1))
    assert found is not None
    assert torch.equal(found, expected)


@torch.no_grad()
def test_other_row_major_weights_are_left_to_bitsandbytes(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "hf_spec"):
        half = layer(row_major=True, compute_dtype=torch.float16)
        assert four_bit_forward(half, states(1)) is None
        # Some blocks of 64 inputs belong to two outputs.
        wide = layer(row_major=True, inputs=96)
        assert four_bit_forward(wide, states(2).view(1, -1, 96)) is None
        assert four_bit_forward(layer(row_major=True), states(1)) is not None
    assert "torch.float16, a weight (96, 192)" in caplog.text
    assert "torch.float32, a weight (96, 96) in blocks of 64" in caplog.text


def most_added_bytes(run: Callable[[], object]) -> int:
    """Return the largest growth of the resident memory during a call."""
    # Memory that is free but still resident would hide allocations.
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak(torch.device("cpu"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    run()
    return (peak_bytes(torch.device("cpu")) or 0) - pages * os.sysconf("SC_PAGE_SIZE")


@torch.no_grad()
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize("row_major", LAYOUTS)
def test_the_weight_is_read_in_place(row_major: bool) -> None:
    linear = bnb.nn.Linear4bit(2048, 4096, bias=False, compute_dtype=torch.bfloat16)
    linear.support_avx512bf16_for_cpu &= not row_major
    linear = linear.to("cpu").eval()
    few, weight = torch.randn(4, 2048), linear.weight.data
    linear(few)
    address, codes = linear.weight.data_ptr(), weight.nbytes
    four_bit_forward(linear, few)
    assert most_added_bytes(lambda: four_bit_forward(linear, few)) < codes / 4
    assert linear.weight.data_ptr() == address
    assert most_added_bytes(weight.clone) > 0.9 * codes
    if row_major:
        # bitsandbytes dequantizes the weight.
        assert most_added_bytes(lambda: linear(few)) > 3 * codes


def test_layers_of_other_classes_are_not_ours() -> None:
    class Linear4bit(bnb.nn.Linear4bit):
        pass

    assert is_four_bit(layer(row_major=True))
    assert not is_four_bit(nn.Linear(64, 64))
    assert not is_four_bit(Linear4bit(64, 64))
    assert not is_four_bit(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False))


def test_a_kernel_that_cannot_be_built_is_tried_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail() -> None:
        tried.append(1)
        raise BuildError("no C++ compiler was found")

    monkeypatch.setattr(four_bit.row_major_kernel, "build", fail)
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "hf_spec"):
        assert not is_four_bit(layer(row_major=True))
        assert not is_four_bit(layer(row_major=True))
    assert caplog.text.count("no C++ compiler was found") == len(tried) == 1


def test_layers_of_older_versions_are_left_to_bitsandbytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    linear = layer(row_major=True)
    del linear.support_avx512bf16_for_cpu
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "hf_spec"):
        assert not is_four_bit(linear)
        assert not is_four_bit(linear)
    assert caplog.text.count("this version of bitsandbytes") == 1


@torch.no_grad()
@pytest.mark.parametrize("row_major", LAYOUTS)
def test_installed_forwards_run_the_kernel_and_leave_the_model_as_found(row_major: bool) -> None:
    four_bit_layers = layer(row_major=row_major), layer("fp4", True, row_major)
    model = nn.Sequential(four_bit_layers[0], nn.Linear(96, INPUTS), four_bit_layers[1])
    before = [dict(module.__dict__) for module in model.modules()]
    storage = [model[i].weight.data_ptr() for i in (0, 2)]
    expected = model(states(5))
    ran = launches["four_bit_linear"]
    with install_packed_linears(model):
        with install_packed_linears(model), use_packed_linears():
            inside = model[0](states(5))
            model(states(5))
        assert launches["four_bit_linear"] == ran + 3
        torch.testing.assert_close(model[0](states(5)), inside)
        assert launches["four_bit_linear"] == ran + 3
    with pytest.raises(KeyboardInterrupt), install_packed_linears(model):
        raise KeyboardInterrupt
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert [model[i].weight.data_ptr() for i in (0, 2)] == storage
    assert torch.equal(model(states(5)), expected)


@pytest.mark.parametrize("row_major", LAYOUTS)
def test_calls_with_gradients_are_left_to_bitsandbytes(row_major: bool) -> None:
    linear = layer(row_major=row_major).requires_grad_(False)
    ran = launches["four_bit_linear"]
    with install_packed_linears(linear), use_packed_linears():
        linear(states(5))
        assert launches["four_bit_linear"] == ran
        with torch.no_grad():
            linear(states(5))
    assert launches["four_bit_linear"] == ran + 1


@needs_layout
@torch.no_grad()
def test_codes_are_moved_to_huge_pages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[list[int]] = []
    monkeypatch.setattr(
        huge_pages, "move", lambda tensors: moved.append([one.data_ptr() for one in tensors])
    )
    linear = bnb.nn.Linear4bit(INPUTS, 96, quant_type="nf4").to("cpu").eval()
    model = nn.Sequential(linear)
    for _ in range(3):
        with install_packed_linears(model), use_packed_linears():
            # bitsandbytes rearranges the codes, which moves them to another address.
            model(torch.zeros(1, INPUTS))
    assert moved == [[], [linear.weight.data_ptr()], []]
