"""Loading of the model and tokenizer that are passed to a study's command line."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_model(name: str, dtype: torch.dtype | str = torch.float32) -> tuple[Any, Any]:
    """Return the model in a folder or on the Hub, in evaluation mode, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(name)
