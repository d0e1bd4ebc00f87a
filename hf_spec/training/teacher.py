"""What the target thought at every position of its answers, computed once and kept on disk.

Distilling needs the target's next-token distribution at each answer token. Its top tokens are
stored; every training and every epoch after the first reads them back instead of running the target
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.base_name import local_name
from hf_spec.training.answers import answer_batches, answer_logits, stored
from hf_spec.training.responses import Response


@dataclass(frozen=True)
class Example:
    """An answer of T tokens with the target's opinion at each of them.

    Attributes:
        top_tokens: (T, K) int64, the target's K most probable tokens, given what precedes.
        top_probs: (T, K) float32, their probabilities over the whole vocabulary.
    """

    response: Response
    top_tokens: Tensor
    top_probs: Tensor

    @classmethod
    def without_opinion(cls, response: Response) -> Example:
        """An answer for a training that asks for no opinion: K is 0."""
        nothing = torch.zeros(len(response.response), 0)
        return cls(response, nothing.long(), nothing)


def teacher_examples(
    model: PreTrainedModel, responses: Sequence[Response], folder: Path, top: int = 32
) -> list[Example]:
    """Examples for `responses` with the `top` K tokens, computed where `folder` lacks them.

    The answers are in a fixed order, more may be appended between calls. `folder` holds about 6 x K
    bytes per answer token.

    Raises:
        OptionError: if `folder` was made from another model, K or other answers.
    """

    def compute(shard: Sequence[Response]) -> dict[str, Tensor]:
        parts = []
        for batch in answer_batches(shard):
            scores = answer_logits(model, batch).float().log_softmax(dim=-1)
            parts.append(scores.topk(top, dim=-1))
        return {
            "tokens": torch.cat([tokens.int().cpu() for _, tokens in parts]),
            "log_probs": torch.cat([values.half().cpu() for values, _ in parts]),
        }

    facts = {"target": local_name(model), "top": str(top)}
    return [
        Example(response, found["tokens"].long(), found["log_probs"].float().exp())
        for response, found in stored(folder, "teacher", responses, facts, compute)
    ]
