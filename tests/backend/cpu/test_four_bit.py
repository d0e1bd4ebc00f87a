"""4-bit layers of bitsandbytes: the same bits, read where bitsandbytes stores them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hf_spec_kernels import launches
from torch import Tensor, nn

from hf_spec.backend.cpu import four_bit
from hf_spec.backend.cpu.four_bit import MAX_ROWS, four_bit_forward, is_four_bit
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from tests.compiler import needs_compiler

bnb = pytest.importorskip("bitsandbytes")

needs_layout = pytest.mark.skipif(
    not getattr(bnb.nn.Linear4bit(64, 64), "support_avx512bf16_for_cpu", False),
    reason="bitsandbytes has its layout for AVX512-BF16 only",
)
pytestmark = [needs_compiler, needs_layout]

DTYPES = [torch.float32, torch.bfloat16]


def layer(kind: str = "nf4", nested: bool = False, **options: Any) -> Any:
    """A layer of 96 outputs and 192 inputs in the layout of its first call."""
    torch.manual_seed(0)
    linear = bnb.nn.Linear4bit(192, 96, quant_type=kind, compress_statistics=nested, **options)
    with torch.no_grad():
        linear.bias.normal_()
        linear.weight.normal_()
    linear = linear.to("cpu").eval()
    with torch.no_grad():
        linear(torch.zeros(1, 192))
    return linear


def states(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, rows, 192, generator=generator).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_bits_are_those_of_bitsandbytes(
    kind: str, nested: bool, compute: torch.dtype | None, dtype: torch.dtype
) -> None:
    linear = layer(kind, nested, compute_dtype=compute)
    for rows in (*range(1, 18), MAX_ROWS):
        found, expected = four_bit_forward(linear, states(rows, dtype)), linear(states(rows, dtype))
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_scale_of_the_next_block_changes_the_bits() -> None:
    linear = layer()
    expected = linear(states(3))
    quantization = linear.weight.quant_state
    quantization.absmax = quantization.absmax.roll(1, 0).contiguous()
    found = four_bit_forward(linear, states(3))
    assert found is not None
    assert (found - expected).norm() > 0.01 * expected.norm()


@torch.no_grad()
def test_other_calls_are_left_to_bitsandbytes() -> None:
    linear = layer()
    for rows in (0, MAX_ROWS + 1):
        assert four_bit_forward(linear, states(rows)) is None
    assert four_bit_forward(linear.train(), states(1)) is None
    fresh = bnb.nn.Linear4bit(192, 96).to("cpu").eval()
    assert four_bit_forward(fresh, states(1)) is None


def test_layers_of_other_classes_are_not_ours() -> None:
    class Linear4bit(nn.Linear):
        pass

    assert is_four_bit(layer())
    assert not is_four_bit(nn.Linear(64, 64))
    assert not is_four_bit(Linear4bit(64, 64))
    assert not is_four_bit(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False))


def test_without_the_layout_the_log_has_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    linear = layer()
    linear.support_avx512bf16_for_cpu = False
    four_bit._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "hf_spec"):
        assert not is_four_bit(linear)
        assert not is_four_bit(linear)
    assert caplog.text.count("no AVX512-BF16 layout") == 1


@torch.no_grad()
def test_installed_forwards_run_the_kernel_and_leave_the_model_as_found() -> None:
    model = nn.Sequential(layer(), nn.Linear(96, 192), layer("fp4", True))
    before = [dict(module.__dict__) for module in model.modules()]
    storage = [model[i].weight.data_ptr() for i in (0, 2)]
    expected = model(states(5))
    ran = launches["four_bit_linear"]
    with install_packed_linears(model):
        with install_packed_linears(model), use_packed_linears():
            inside = model[0](states(5))
            model(states(5))
        assert launches["four_bit_linear"] == ran + 3
        assert torch.equal(model[0](states(5)), inside)
        assert launches["four_bit_linear"] == ran + 3
    with pytest.raises(KeyboardInterrupt), install_packed_linears(model):
        raise KeyboardInterrupt
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert [model[i].weight.data_ptr() for i in (0, 2)] == storage
    assert torch.equal(model(states(5)), expected)


def test_calls_with_gradients_are_left_to_bitsandbytes() -> None:
    linear, ran = layer().requires_grad_(False), launches["four_bit_linear"]
    with install_packed_linears(linear), use_packed_linears():
        linear(states(5))
        assert launches["four_bit_linear"] == ran
        with torch.no_grad():
            linear(states(5))
    assert launches["four_bit_linear"] == ran + 1
