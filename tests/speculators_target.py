"""Target of heads that the package speculators loads; their configs have its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from tests.tiny_models import LLAMA_LIKE


def saved_target(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: T.PreTrainedModel | None = None
) -> Any:
    """Save a model (default: random, eight layers) as `target`; return it as loaded from there."""
    # speculators loads it by the relative name of the folder.
    monkeypatch.chdir(folder)
    if model is None:
        torch.manual_seed(0)
        model = T.LlamaForCausalLM(T.LlamaConfig(**{**LLAMA_LIKE, "num_hidden_layers": 8}))
    model.save_pretrained(folder / "target")
    return T.AutoModelForCausalLM.from_pretrained(folder / "target").eval()
