"""Loading of the model and the tokenizer for the studies."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.studies.models import load_model
from tests.tiny_models import build, tokenizer


def test_both_come_from_one_folder(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model, read = load_model(str(tmp_path))
    assert not model.training
    assert model.dtype == torch.float32
    assert read.get_vocab() == tokenizer().get_vocab()
    assert load_model(str(tmp_path), torch.bfloat16)[0].dtype == torch.bfloat16
