"""Adapters quantized to 8 and 4 bits: accuracy, stability, and errors for damaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_spec import AssistantError, OptionError, SpecAdapter
from hf_spec.adapters.adapter import WEIGHTS_NAME
from hf_spec.adapters.quantized import dequantize, quantize
from tests.adapters.samples import METHODS, PROMPT, drafted, fresh_model, plain, sample

FEW = (8, 4)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Return a matrix with a group of zeros, a 3D tensor, and tensors that are not quantized."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 64, generator=generator)
    matrix[2] = 0
    return {
        "matrix": matrix,
        "deep": torch.randn(2, 4, 32, generator=generator).bfloat16(),
        "vector": torch.randn(64, generator=generator),
        "odd": torch.randn(5, 7, generator=generator),
        "tokens": torch.arange(64).int(),
    }


@pytest.mark.parametrize("bits", FEW)
def test_numbers_are_off_by_half_a_step_at_most(tensors: dict[str, Tensor], bits: int) -> None:
    found, said = dequantize(quantize(tensors, bits), "here")
    assert (said, found.keys()) == (bits, tensors.keys())
    for name in ("matrix", "deep"):
        groups = tensors[name].float().reshape(-1, 64)
        step = groups.abs().amax(dim=1) / (2 ** (bits - 1) - 1)
        error = (found[name].reshape(-1, 64) - groups).abs().amax(dim=1)
        # Scales are stored in half precision.
        assert (error <= step * (0.5 + 2.0**-3) + 1e-7).all()
        assert error.sum() > 0
        assert found[name].shape == tensors[name].shape
    for name in ("vector", "odd", "tokens"):
        assert found[name] is tensors[name]


@pytest.mark.parametrize("bits", FEW)
def test_to_store_it_again_changes_nothing(tensors: dict[str, Tensor], bits: int) -> None:
    once = quantize(tensors, bits)
    again = quantize(dequantize(once, "here")[0], bits)
    assert all(again[name].equal(once[name]) for name in once)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", FEW)
def test_an_adapter_says_and_keeps_its_bits(tmp_path: Path, method: str, bits: int) -> None:
    small, again = tmp_path / "small", tmp_path / "again"
    replace(sample(method), bits=bits).save_pretrained(small)
    loaded = SpecAdapter.from_pretrained(small)
    loaded.save_pretrained(again)
    kinds = {tensor.dtype for tensor in load_file(small / WEIGHTS_NAME).values()}
    assert (torch.int8 if bits == 8 else torch.uint8) in kinds
    assert loaded.bits == bits
    assert (again / WEIGHTS_NAME).read_bytes() == (small / WEIGHTS_NAME).read_bytes()


def test_its_output_is_the_targets(tmp_path: Path) -> None:
    replace(sample("falcon"), bits=8).save_pretrained(tmp_path)
    model = fresh_model()
    model.load_adapter(str(tmp_path))
    assert drafted(model, "falcon").tolist() == plain(model).tolist()


def test_peft_loads_and_saves_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    replace(sample("falcon"), bits=4).save_pretrained(first)
    PeftModel.from_pretrained(fresh_model(), str(first)).save_pretrained(str(second))
    before, after = (SpecAdapter.from_pretrained(folder) for folder in (first, second))
    assert after.bits == 4
    assert all(after.tensors[name].equal(before.tensors[name]) for name in before.tensors)


def test_other_bits(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"bits=5: .* 16, 8 or 4"):
        replace(sample("falcon"), bits=5).save_pretrained(tmp_path / "new")


class TestDamaged:
    @pytest.mark.parametrize("bits", FEW)
    @pytest.mark.parametrize("damage", ["missing", "short", "float32", "infinite", "nameless"])
    def test_scales_and_names(self, tmp_path: Path, bits: int, damage: str) -> None:
        replace(sample("falcon"), bits=bits).save_pretrained(tmp_path)
        path = tmp_path / WEIGHTS_NAME
        found = load_file(path)
        name = next(name for name in found if name.endswith(f".int{bits}"))
        scales = name.removesuffix(f".int{bits}") + ".scales"
        changed = {
            "missing": lambda: found.pop(scales),
            "short": lambda: found.update({scales: found[scales][1:].clone()}),
            "float32": lambda: found.update({scales: found[scales].float()}),
            "infinite": lambda: found[scales].fill_(float("inf")),
            "nameless": lambda: found.update({"weight": found.pop(name)}),
        }
        changed[damage]()
        save_file(found, path)
        with pytest.raises(AssistantError, match=str(path)):
            SpecAdapter.from_pretrained(tmp_path)

    def test_a_weight_that_is_there_twice(self, tensors: dict[str, Tensor]) -> None:
        both = {**tensors, **quantize({"matrix": tensors["matrix"]}, 8)}
        with pytest.raises(AssistantError, match=r"matrix\.int8"):
            dequantize(both, "here")


def test_generate_takes_the_folder(tmp_path: Path) -> None:
    replace(sample("draft"), bits=8).save_pretrained(tmp_path)
    model = fresh_model()
    arguments = {"max_new_tokens": 10, "do_sample": False}
    output = model.generate(PROMPT, spec_strategy="draft", assistant=str(tmp_path), **arguments)
    assert output.tolist() == plain(model).tolist()
