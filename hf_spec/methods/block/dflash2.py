"""DFlash 2's convolutions and candidate selector, which relate the positions of a block.

Each sublayer, attention or MLP, has a convolution over the positions of the block: side 0 acts on
the sublayer's input, side 1 on its output before the residual. With n the normed input, taps t, and
channels c in groups g(c)::

    delta = kernel_projection(n), a number per position, side, tap, and group
    conv(side, x)[j, c] = sum_t (base_kernel[side, t, c] + delta[j, side, t, g(c)]) * x[j - t, c]

Positions before the block count as zero. For output y_j and the token a before it, the selector
keeps the k largest logits and adds the transition from a to each of these tokens b::

    logits_j[b] += <predecessor_codebook[a] * hidden_projection(y_j), successor_codebook[b]>

Source: z-lab (2026), as in vLLM's `qwen3_dflash2`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_spec.methods.published_weights import linear

SELECTOR = "candidate_selector."
ATTENTION, MLP = "attention_conv.", "mlp_conv."
KERNEL, PROJECTION = "base_kernel", "kernel_projection.weight"


class GroupedConvolution(nn.Module):
    """Causal convolution around a sublayer, with kernels that depend on its input."""

    def __init__(self, kernel: Tensor, projection: Tensor, block_size: int):
        super().__init__()
        # (2, taps, width).
        self.base_kernel = nn.Parameter(kernel, requires_grad=False)
        self.kernel_projection = linear(projection)
        self.block_size = block_size

    def around(self, sublayer: Callable[[Tensor], Tensor], normed: Tensor) -> Tensor:
        """Return the convolved output of a sublayer on its convolved input.

        `normed` is (1, T, width) of packed blocks.
        """
        deltas = self.kernel_projection(normed).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        return self._convolve(1, sublayer(self._convolve(0, normed, deltas)), deltas)

    def _convolve(self, side: int, hidden: Tensor, deltas: Tensor) -> Tensor:
        num_groups = deltas.shape[-1]
        grouped = hidden.unflatten(-1, (num_groups, -1))
        base = self.base_kernel[side].unflatten(-1, (num_groups, -1))
        position = torch.arange(hidden.shape[1], device=hidden.device) % self.block_size
        total = torch.zeros_like(grouped)
        for tap, kernel in enumerate(base):
            outside = (position < tap)[:, None, None]
            shifted = grouped.roll(tap, dims=1).masked_fill(outside, 0)
            total = total + (kernel + deltas[:, :, side, tap, :, None]) * shifted
        return total.flatten(-2)


class ConvolvedLayer(Qwen3DecoderLayer):
    """Layer of Qwen3 with a convolution around its attention and around its MLP."""

    def __init__(
        self, config: Qwen3Config, index: int, tensors: Mapping[str, Tensor], block_size: int
    ):
        super().__init__(config, index)
        self.attention_conv, self.mlp_conv = (
            GroupedConvolution(
                tensors[f"layers.{index}.{name}{KERNEL}"],
                tensors[f"layers.{index}.{name}{PROJECTION}"],
                block_size,
            )
            for name in (ATTENTION, MLP)
        )

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """(1, T, width) -> (1, T, width); `options` are those of the attention."""

        def attention(hidden: Tensor) -> Tensor:
            return self.self_attn(hidden_states=hidden, attention_mask=None, **options)[0]

        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.attention_conv.around(attention, normed)
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.mlp_conv.around(self.mlp, normed)


class CandidateSelector(nn.Module):
    """Transitions from the token before to the most probable tokens of a position."""

    def __init__(self, tensors: Mapping[str, Tensor], num_candidates: int):
        super().__init__()
        self.predecessors, self.successors = (
            nn.Parameter(tensors[f"{SELECTOR}{name}_codebook"], requires_grad=False)
            for name in ("predecessor", "successor")
        )
        self.projection = linear(tensors[f"{SELECTOR}hidden_projection.weight"])
        self.num_candidates = num_candidates

    def forward(self, tokens: Tensor, outputs: Tensor, logits: Tensor) -> Tensor:
        """Return (M, V) float32 logits, -inf but for the candidates of each position.

        Args:
            tokens: (M,) int64 tokens before.
            outputs: (M, width) of the positions.
            logits: (M, V) of the positions, before the selector.
        """
        values, candidates = logits.float().topk(min(self.num_candidates, logits.shape[-1]))
        query = F.embedding(tokens, self.predecessors) * self.projection(outputs)
        transitions = F.embedding(candidates, self.successors) @ query[:, :, None]
        scores = values + transitions[..., 0].float()
        return torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter(
            1, candidates, scores
        )


def is_convolved(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if the layers of a head have convolutions."""
    return f"layers.0.{ATTENTION}{KERNEL}" in tensors


def has_selector(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if a head has a candidate selector."""
    return any(key.startswith(SELECTOR) for key in tensors)


def expected_tensors(
    tensors: Mapping[str, Tensor], num_layers: int, width: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that these tensors must have; taps, groups, and rank are theirs."""
    expected: dict[str, tuple[int, ...]] = {}
    if is_convolved(tensors):
        taps, groups = _sizes(tensors, width)
        for name in (f"layers.{i}.{conv}" for i in range(num_layers) for conv in (ATTENTION, MLP)):
            expected[name + KERNEL] = (2, taps, width)
            expected[name + PROJECTION] = (2 * taps * groups, width)
    if has_selector(tensors):
        projection = tensors.get(f"{SELECTOR}hidden_projection.weight")
        rank = 0 if projection is None else projection.shape[0]
        expected |= {
            f"{SELECTOR}predecessor_codebook": (vocab_size, rank),
            f"{SELECTOR}successor_codebook": (vocab_size, rank),
            f"{SELECTOR}hidden_projection.weight": (rank, width),
        }
    return expected


def _sizes(tensors: Mapping[str, Tensor], width: int) -> tuple[int, int]:
    """Return taps and groups of the first convolution, as of all others; 1 for wrong ones."""
    first = f"layers.0.{ATTENTION}"
    kernel, projection = tensors[first + KERNEL], tensors.get(first + PROJECTION)
    taps = max(kernel.shape[1], 1) if kernel.ndim == 3 else 1
    groups = 0 if projection is None else projection.shape[0] // (2 * taps)
    return taps, groups if groups and width % groups == 0 else 1
