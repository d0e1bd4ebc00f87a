"""The target as the teacher of a head: its next-token distributions over a draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.methods.feature_pairs.draft_head import FewTokensHead
from hf_spec.training.pairs import Pairs


class Teacher:
    """A frozen target's distributions over the R tokens of `vocabulary`; None for all tokens."""

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor | None):
        self.target = target
        self.head = FewTokensHead(target.get_output_embeddings(), vocabulary)

    @torch.no_grad()
    def probs(self, states: Tensor) -> Tensor:
        """Return (M, R) float32 probabilities after (M, H) hidden states behind the final norm."""
        with self.autocast():
            return self.head.draft_logits(states.to(self.target.dtype)).float().softmax(dim=-1)

    def probs_at(self, pairs: Pairs, rows: Tensor, positions: Tensor) -> Tensor:
        """Return (M, R) probabilities of the tokens after t_{i+1} at M positions of texts.

        The last of the layers in `pairs` is the state behind the final norm.
        """
        width = self.target.config.get_text_config().hidden_size
        return self.probs(pairs.features[rows, positions + 1, -width:])

    def autocast(self) -> torch.autocast:
        """Return autocast to bfloat16, enabled for targets in half precision."""
        half = self.target.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=half)


def cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return (M,) cross-entropy in nats between (M, R) draft logits and target probabilities."""
    return F.cross_entropy(logits.float(), probs, reduction="none")


def output_rows(target: PreTrainedModel, vocabulary: Tensor | None) -> Tensor:
    """Return a copy of the (R, H) rows of the target's output head."""
    rows: Tensor = FewTokensHead(target.get_output_embeddings(), vocabulary).scores.weight
    return rows.detach().clone()
