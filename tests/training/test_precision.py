"""Which trainings compute in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_spec.training import precision
from hf_spec.training.precision import mixed_precision
from tests.tiny_models import build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("able", [True, False])
def test_float32_models_wait_for_no_emulation(
    dtype: torch.dtype, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(build("llama")).to(dtype)
    monkeypatch.setattr(precision, "has_bfloat16", lambda: able)
    states = torch.randn(2, model.config.hidden_size)
    with torch.no_grad(), mixed_precision(model):
        if able or dtype == torch.bfloat16:
            assert model.get_output_embeddings()(states).dtype == torch.bfloat16
        else:
            assert model.get_output_embeddings()(states).dtype == torch.float32
