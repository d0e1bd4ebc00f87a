"""Loading a target: dtype, device, and errors for models that cannot be loaded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_spec import OptionError
from hf_spec.cli.app import build_app
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.cli.options import Placement
from tests.adapters.samples import save_sample
from tests.cli.train.cli_files import save_model
from tests.tiny_models import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a model in bfloat16, like most published models."""
    save_model(tmp_path / "model")
    copy.deepcopy(build("llama")).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_dtypes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_target(str(folder), Placement("bfloat16", "cpu"))
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert load_target(str(folder), Placement(device="cpu")).dtype == torch.float32
    # On a GPU the weights keep their stored dtype.
    monkeypatch.setattr("hf_spec.cli.loading._device", lambda name: torch.device("meta"))
    assert load_target(str(folder)).dtype == torch.bfloat16


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    for device in ("abacus", "cuda:99", "xla", "hpu"):
        with pytest.raises(OptionError, match=f"--device {device}: .*choose cpu"):
            load_target(str(tmp_path), Placement(device=device))


def test_a_device_without_weights() -> None:
    result = CliRunner().invoke(build_app(), ["generate", "unused", "Hello.", "--device", "meta"])
    assert result.exit_code == 2
    assert "--device meta stores no weights; choose cpu, cuda, cuda:1, mps or xpu" in result.output


@pytest.mark.parametrize("load", [load_target, load_tokenizer])
def test_folders_that_hold_no_model(load: object, tmp_path: Path) -> None:
    assert callable(load)
    with pytest.raises(OptionError, match="there is no folder"):
        load(str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match="cannot be loaded") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(OptionError, match=f"{folder} cannot be loaded"):
        load_target(str(folder))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    with pytest.raises(
        OptionError, match=f"is an adapter, not a model; .*--strategy NAME@{folder}"
    ):
        load_target(str(folder))
