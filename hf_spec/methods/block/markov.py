"""DSpark's Markov and confidence heads, which make a block's drafts depend on each other.

The outputs y_j of a block are computed in one pass, so none depends on the tokens drafted at the
others. With t the token before position j, w1 (V, r) and w2 (R, r)::

    vanilla   logits_j += w2 w1[t]
    gated     logits_j += w2 (sigmoid(gate_proj([y_j; w1[t]])) * w1[t])
    rnn       z, candidate, out = joint_proj([s; w1[t]; y_j]),  g = sigmoid(z)
              s = g * s + (1 - g) * tanh(candidate),  logits_j += w2 tanh(out)
    confidence_j = sigmoid(proj([y_j; w1[t]])), the probability that the target accepts position j
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.methods.published_weights import linear

PREFIX = "markov_head."
CONFIDENCE = "confidence_head.proj."


class MarkovHead(nn.Module):
    """Low-rank bias of the logits from the token before."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        weights = {k.removeprefix(PREFIX): t for k, t in tensors.items() if k.startswith(PREFIX)}
        self.w1 = nn.Parameter(weights["markov_w1.weight"], requires_grad=False)
        self.w2 = linear(weights["markov_w2.weight"])
        self.rank = self.w1.shape[1]
        self.gate, self.joint = (
            linear(weights[f"{name}.weight"], weights[f"{name}.bias"])
            if f"{name}.weight" in weights
            else None
            for name in ("gate_proj", "joint_proj")
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """(M,) int64 token ids -> (M, r) rows of w1."""
        return F.embedding(tokens, self.w1)

    def forward(self, before: Tensor, outputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (M, R) bias of the logits at M positions, and the (M, r) state after them.

        It reads the (M, r) embeddings of the tokens before and the (M, width) outputs of the block;
        the "rnn" kind also the (M, r) state after the positions before, zeros at first.
        """
        if self.gate is not None:
            before = self.gate(torch.cat([outputs, before], dim=-1)).sigmoid() * before
        elif self.joint is not None:
            joined = self.joint(torch.cat([state, before, outputs], dim=-1))
            keep, candidate, before = joined.chunk(3, dim=-1)
            keep = keep.sigmoid()
            state = keep * state + (1 - keep) * candidate.tanh()
            before = before.tanh()
        return self.w2(before), state


class ConfidenceHead(nn.Module):
    """Predicts the probability that the target accepts the token drafted at a position.

    Its weight is (1, width), or (1, width + r) if it also reads the token before.
    """

    def __init__(self, tensors: Mapping[str, Tensor], width: int):
        super().__init__()
        self.proj = linear(tensors[CONFIDENCE + "weight"], tensors[CONFIDENCE + "bias"])
        self.reads_token = self.proj.in_features > width

    def forward(self, outputs: Tensor, before: Tensor | None) -> Tensor:
        """(M, width) outputs, and (M, r) of the tokens before if read -> (M,) float32."""
        if self.reads_token:
            assert before is not None, "expected_tensors allows this only with a Markov head"
            outputs = torch.cat([outputs, before], dim=-1)
        return self.proj(outputs)[:, 0].float().sigmoid()


def expected_tensors(
    tensors: Mapping[str, Tensor], width: int, draft_vocab_size: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the tensors of these heads must have, for R = `draft_vocab_size`.

    The kind, its rank, and whether the confidence head reads tokens follow from `tensors`.
    """
    expected: dict[str, tuple[int, ...]] = {}
    rank = 0
    if any(key.startswith(PREFIX) for key in tensors):
        w1 = tensors.get(PREFIX + "markov_w1.weight")
        rank = 0 if w1 is None else w1.shape[-1]
        expected = {
            "markov_w1.weight": (vocab_size, rank),
            "markov_w2.weight": (draft_vocab_size, rank),
        }
        if f"{PREFIX}gate_proj.weight" in tensors:
            expected |= {"gate_proj.weight": (rank, width + rank), "gate_proj.bias": (rank,)}
        if f"{PREFIX}joint_proj.weight" in tensors:
            joined = 2 * rank + width
            expected |= {"joint_proj.weight": (3 * rank, joined), "joint_proj.bias": (3 * rank,)}
        expected = {PREFIX + name: shape for name, shape in expected.items()}
    if (weight := tensors.get(CONFIDENCE + "weight")) is not None:
        inputs = width + rank if rank and weight.shape[-1] > width else width
        expected |= {CONFIDENCE + "weight": (1, inputs), CONFIDENCE + "bias": (1,)}
    return expected
