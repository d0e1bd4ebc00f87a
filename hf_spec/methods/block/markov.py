"""What DSpark adds to a block: each token depends on the one before, and how sure the head is.

The outputs of a block are computed at once, so none knows what another one drafts. A *Markov head*
adds to the logits of each place what the token before it makes likelier, left to right, through a
product of low rank: w2 @ w1[token]. Three kinds: "vanilla" is just that; "gated" weighs w1[token]
by what the place's output says; "rnn" carries a state along the block. A *confidence head* says of
each place how likely the target is to accept what is drafted there.
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
    """Biases of logits by the token before, from tensors "markov_w1.weight" and so on.

    Attributes:
        rank: width r of the product.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        given = {k.removeprefix(PREFIX): t for k, t in tensors.items() if k.startswith(PREFIX)}
        self.w1 = nn.Parameter(given["markov_w1.weight"], requires_grad=False)
        self.w2 = linear(given["markov_w2.weight"])
        self.rank = self.w1.shape[1]
        self.gate, self.joint = (
            linear(given[f"{name}.weight"], given[f"{name}.bias"])
            if f"{name}.weight" in given
            else None
            for name in ("gate_proj", "joint_proj")
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """(M,) int64 token ids -> (M, r)."""
        return F.embedding(tokens, self.w1)

    def forward(self, before: Tensor, outputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The bias at M places.

        Args:
            before: (M, r) the embedded tokens before them.
            outputs: (M, width) of the block there.
            state: (M, r) that the places before left; zeros at first, and of no use to other kinds.

        Returns:
            (M, R) what is added to the logits, and the state after them.
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
    """The chance that the target accepts what is drafted at a place.

    Its weight is (1, width), or (1, width + r) where it also reads the token before, as the Markov
    head embeds it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], width: int):
        super().__init__()
        self.proj = linear(tensors[CONFIDENCE + "weight"], tensors[CONFIDENCE + "bias"])
        self.reads_token = self.proj.in_features > width

    def forward(self, outputs: Tensor, before: Tensor | None) -> Tensor:
        """(M, width) outputs of the block and maybe (M, r) embedded tokens -> (M,) float32."""
        if self.reads_token:
            assert before is not None, "checked when the head was built"
            outputs = torch.cat([outputs, before], dim=-1)
        return self.proj(outputs)[:, 0].float().sigmoid()


def expected_tensors(
    given: Mapping[str, Tensor], width: int, num_known: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of these heads, if there are any, for R `num_known` outputs.

    Which kind there is, its rank, and what the confidence head reads follow from the tensors given.
    """
    expected: dict[str, tuple[int, ...]] = {}
    rank = 0
    if any(key.startswith(PREFIX) for key in given):
        w1 = given.get(PREFIX + "markov_w1.weight")
        rank = 0 if w1 is None else w1.shape[-1]
        expected = {"markov_w1.weight": (vocab_size, rank), "markov_w2.weight": (num_known, rank)}
        if f"{PREFIX}gate_proj.weight" in given:
            expected |= {"gate_proj.weight": (rank, width + rank), "gate_proj.bias": (rank,)}
        if f"{PREFIX}joint_proj.weight" in given:
            joined = 2 * rank + width
            expected |= {"joint_proj.weight": (3 * rank, joined), "joint_proj.bias": (3 * rank,)}
        expected = {PREFIX + name: shape for name, shape in expected.items()}
    if (weight := given.get(CONFIDENCE + "weight")) is not None:
        read = width + rank if rank and weight.shape[-1] > width else width
        expected |= {CONFIDENCE + "weight": (1, read), CONFIDENCE + "bias": (1,)}
    return expected
