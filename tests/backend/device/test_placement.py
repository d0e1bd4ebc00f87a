"""Offloaded, quantized and PEFT-wrapped weights are read like weights in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hf_spec.backend.device.placement import dense_copy, execution_device, is_quantized, weight_rows
from hf_spec.common.errors import UnsupportedError

ROWS = torch.tensor([4, 0])


class Halves(nn.Module):
    """Linear layer that stores its weight as doubled integers."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter((2 * linear.weight.detach()).round().char(), requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.to(hidden.dtype).T / 2 + self.bias


def test_rows_in_memory_and_on_disk(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2))
    table: Any = model[0]
    expected = table.weight.detach().clone()
    assert torch.equal(weight_rows(table), expected)
    assert torch.equal(weight_rows(table, ROWS), expected[ROWS])
    assert execution_device(table) == torch.device("cpu")
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert table.weight.device.type == "meta"
    assert torch.equal(weight_rows(table, ROWS), expected[ROWS])
    assert table.weight.device.type == "meta"
    assert execution_device(table) == torch.device("cpu")


def test_a_dense_copy_of_what_is_quantized() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Halves(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 2))
    assert is_quantized(layers[0])
    assert not is_quantized(layers[2])
    copied = dense_copy(layers, torch.float32)
    assert isinstance(copied[0], nn.Linear)  # type: ignore[index]
    assert isinstance(layers[0], Halves)
    given = torch.randn(4, 3)
    torch.testing.assert_close(copied(given), layers(given))
    with pytest.raises(UnsupportedError, match="exclude embedding and head"):
        weight_rows(layers[0])


def test_a_copy_leaves_a_lora_behind() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    given = torch.randn(5, 3)
    plain = layers(given)
    config = LoraConfig(target_modules=["0"], init_lora_weights=False)
    wrapped = inject_adapter_in_model(config, layers)
    assert not torch.equal(wrapped(given), plain)
    assert torch.equal(dense_copy(wrapped, torch.float32)(given), plain)
