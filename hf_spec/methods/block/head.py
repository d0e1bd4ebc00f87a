"""Network of DFlash and DSpark heads: attention layers over a block and over the target's context.

For committed position i and block position j, with E the target's embedding (Chen et al. 2026,
arXiv 2602.06036)::

    c_i = hidden_norm(fc([hidden states of several target layers at i])), the same for all layers
    x_j = E[last token] for j = 0, E[mask] after it
    each layer: queries from x; keys and values from [c; input_layernorm(x)]
    logits_j = output(norm(x_j))

The block attends to itself in both directions, unless a layer is causal. Keys and values of the
context are stored once; those of the block are dropped. DSpark adds the heads of
`hf_spec.methods.block.markov`, DFlash 2 the parts of `hf_spec.methods.block.dflash2`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from hf_spec.adapters.adapter import BaseModel
from hf_spec.engine.forward.step import PackedStep
from hf_spec.methods.block.dflash2 import (
    CandidateSelector,
    ConvolvedLayer,
    has_selector,
    is_convolved,
)
from hf_spec.methods.block.markov import CONFIDENCE, ConfidenceHead, MarkovHead
from hf_spec.methods.block.markov import PREFIX as MARKOV
from hf_spec.methods.one_pass_heads import OnePassHead
from hf_spec.methods.published_weights import OutputHead

STRATEGY = "block"

# Cosines and sines, (T, D) each.
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockShape:
    """Configuration of a block head.

    Attributes:
        block_size: b, positions of a block.
        from_anchor: each output drafts the token after its position, so the first drafts, too.
        mask_token_id: token at all positions but the first.
        hidden_layers: indices into the target's `hidden_states` that make the context.
        causal: per layer True if the block attends to itself causally.
        embedding_scale, output_scale: factors on the target's embedding and on the logits.
        softcap: tanh soft cap of the logits after that; 0 for none.
        num_candidates: k, tokens per position among which DFlash 2's selector chooses.
        draft_window: most tokens that a layer attends to, see `BlockConfig`; None for the config's.
    """

    block_size: int
    from_anchor: bool
    mask_token_id: int
    hidden_layers: tuple[int, ...]
    causal: tuple[bool, ...]
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0
    num_candidates: int = 0
    draft_window: int | None = None

    @property
    def num_levels(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


class BlockHead(OnePassHead):
    """DFlash or DSpark head, built from tensors under the names that all layouts share.

    The embedding of the block's tokens is the head's, or the target's. `markov` and `confidence`
    are DSpark's heads, `selector` is DFlash 2's; None without.
    """

    strategy = STRATEGY

    def __init__(
        self,
        base: BaseModel,
        shape: BlockShape,
        config: Qwen3Config,
        tensors: Mapping[str, Tensor],
        embedding: nn.Module,
        output: OutputHead,
    ):
        super().__init__()
        self.base = base
        self.shape = shape
        self.hidden_layers, self.num_levels = shape.hidden_layers, shape.num_levels
        width, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.fc = nn.Linear(tensors["fc.weight"].shape[1], width, bias=False)
            self.hidden_norm = nn.RMSNorm(width, eps)
            self.layers = nn.ModuleList(
                block_layer(limited(config, index, shape), index, tensors, shape.block_size)
                for index in range(len(shape.causal))
            )
            self.norm = nn.RMSNorm(width, eps)
        self.load_state_dict(tensors, strict=False, assign=True)
        self.requires_grad_(False)
        self.rotary = Qwen3RotaryEmbedding(config).to(tensors["fc.weight"].device)
        self.embedding, self.output = embedding, output
        self.markov = MarkovHead(tensors) if f"{MARKOV}markov_w1.weight" in tensors else None
        has_confidence = f"{CONFIDENCE}weight" in tensors
        self.confidence = ConfidenceHead(tensors, width) if has_confidence else None
        self.selector = (
            CandidateSelector(tensors, shape.num_candidates) if has_selector(tensors) else None
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and activations."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.fc.weight.device

    def context(self, states: Sequence[Tensor]) -> Tensor:
        """(T, H) hidden states, one tensor per `hidden_layers` -> (T, width) context vectors."""
        joined = torch.cat([part.to(self.device, self.dtype) for part in states], dim=-1)
        return self.hidden_norm(self.fc(joined))

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation of (T,) int64 positions."""
        like = self.fc.weight[:1]
        cos, sin = self.rotary(like, positions[None])
        return cos[0], sin[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """(T,) int64 -> (T, width) scaled rows of the embedding table."""
        weight: Any = self.embedding.weight
        rows = F.embedding(tokens.to(weight.device), weight)
        return rows.to(self.device, self.dtype) * self.shape.embedding_scale

    def forward(
        self, hidden: Tensor, rotation: Rotation, steps: Mapping[bool, PackedStep]
    ) -> Tensor:
        """(T, width) embeddings of packed blocks -> (T, width) outputs.

        Causal layers run `steps[True]`, others `steps[False]`.
        """
        cos, sin = rotation
        hidden, where = hidden[None], (cos[None], sin[None])
        for layer, causal in zip(self.layers, self.shape.causal, strict=True):
            hidden = layer(hidden, position_embeddings=where, spec_step=steps[causal])
        return self.norm(hidden[0])

    def logits(self, outputs: Tensor) -> Tensor:
        """(..., width) -> (..., R) logits over the draft vocabulary."""
        logits = self.output.draft_logits(outputs) * self.shape.output_scale
        if self.shape.softcap:
            logits = torch.tanh(logits / self.shape.softcap) * self.shape.softcap
        return logits


def block_layer(
    config: Qwen3Config, index: int, tensors: Mapping[str, Tensor], block_size: int
) -> Qwen3DecoderLayer:
    """Return a layer of Qwen3 with torch's RMS norms, without weights but for convolutions."""
    layer: Any
    if is_convolved(tensors):
        layer = ConvolvedLayer(config, index, tensors, block_size)
    else:
        layer = Qwen3DecoderLayer(config, index)
    for parent in (layer, layer.self_attn):
        for name, norm in parent.named_children():
            if isinstance(norm, Qwen3RMSNorm):
                setattr(parent, name, nn.RMSNorm(len(norm.weight), norm.variance_epsilon))
    return layer


def limited(config: Qwen3Config, index: int, shape: BlockShape) -> Qwen3Config:
    """Return the config of a layer whose window is at most the draft window."""
    window, kinds = shape.draft_window, config.layer_types or []
    if window is None:
        return config
    own = config.sliding_window if kinds[index] == "sliding_attention" else None
    changed = copy.copy(config)
    changed.layer_types = ["sliding_attention"] * len(kinds)
    changed.sliding_window = window if own is None else min(window, own)
    return changed


def keys_values(attention: Any, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return keys and values (H_kv, T, D) of (T, width) states in the attention of a layer."""
    shape = (len(states), -1, attention.head_dim)
    key = attention.k_norm(attention.k_proj(states).view(shape)).transpose(0, 1)
    (cos, sin), value = rotation, attention.v_proj(states).view(shape).transpose(0, 1)
    return key * cos + rotate_half(key) * sin, value
