"""Vocabulary sizes, and draft models whose vocabulary is padded to another size.

Embeddings are padded to different numbers of rows in models of one family (Qwen2.5: 151,936 and
152,064 for one tokenizer). The added rows encode no text.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

# Largest difference caused by padding; a larger one means another tokenizer.
PADDED_ROWS = 128


def num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of token ids that have an embedding."""
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def fit_tokens(tokens: Tensor, size: int) -> Tensor:
    """Clamp token ids for a model with `size` embeddings."""
    return tokens.clamp_max(size - 1)


def fit_logits(logits: Tensor, size: int) -> Tensor:
    """Cut (..., V) logits to `size` columns, or pad them with -inf."""
    return F.pad(logits, (0, size - logits.shape[-1]), value=float("-inf"))
