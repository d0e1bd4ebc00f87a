"""Vocabularies: how large they are, and drafts from a model whose own is padded to another size.

Rows of an embedding are rounded up, and to other numbers in models of one family (Qwen2.5: 151,936
and 152,064 for one tokenizer). The added ones stand for no text.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

# The largest difference that padding is known to make; a larger one is another tokenizer.
PADDED_ROWS = 128


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of token ids that have an embedding."""
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def fit_tokens(tokens: Tensor, size: int) -> Tensor:
    """Token ids for a model with `size` embeddings; ids beyond them become the last one."""
    return tokens.clamp_max(size - 1)


def fit_logits(logits: Tensor, size: int) -> Tensor:
    """(..., V) logits in `size` columns: cut, or filled up with -inf."""
    return F.pad(logits, (0, size - logits.shape[-1]), value=float("-inf"))
