"""What commands share: loading a target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from hf_spec.training.cli_common import load_target
from tests.training.cli_files import save_model


def test_a_target_comes_in_its_dtype(tmp_path: Path) -> None:
    model = load_target(str(save_model(tmp_path)), "bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    with pytest.raises(typer.BadParameter, match="choose float32, bfloat16 or float16"):
        load_target(str(tmp_path), "int8")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    for device in ("abacus", *([] if torch.cuda.is_available() else ["cuda:1"])):
        with pytest.raises(typer.BadParameter, match=f"--device {device}"):
            load_target(str(tmp_path), "auto", device)
