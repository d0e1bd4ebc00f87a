"""A copy of a model with more key-value heads computes the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from examples.studies.falcon import full_width
from tests.cli.train.cli_files import save_model

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), LlamaConfig(**SIZES, head_dim=6), Qwen2Config(**SIZES)]
)
def test_the_copy_computes_the_same(config: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    wide = full_width.full_width(model)
    assert wide.config.num_key_value_heads == 4
    assert model.config.num_key_value_heads == 2
    ids = torch.randint(0, 40, (2, 9))
    torch.testing.assert_close(wide(ids).logits, model(ids).logits)


def test_a_folder_is_written(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    full_width.main(["--model", str(tmp_path / "model"), "--out", str(tmp_path / "wide")])
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.config.num_key_value_heads == wide.config.num_attention_heads
