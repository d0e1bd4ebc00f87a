"""What commands share: loading a target, and saying what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from hf_spec import OptionError
from hf_spec.training.cli_common import in_one_sentence, load_target
from tests.training.cli_files import save_model


def test_a_target_comes_in_its_dtype(tmp_path: Path) -> None:
    model = load_target(str(save_model(tmp_path)), "bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    with pytest.raises(typer.BadParameter, match="choose float32, bfloat16 or float16"):
        load_target(str(tmp_path), "int8")


def test_only_our_own_errors_are_put_in_a_sentence() -> None:
    with pytest.raises(typer.BadParameter, match="k=0 is too small"), in_one_sentence():
        raise OptionError("k=0 is too small")
    with pytest.raises(ZeroDivisionError), in_one_sentence():
        raise ZeroDivisionError
