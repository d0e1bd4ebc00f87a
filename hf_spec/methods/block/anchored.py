"""Many blocks of one text in one pass of a block head, for training.

The keys of a text's context are followed by those of all its blocks. A block that starts behind
position i sees the context up to i and itself, but no other block. Positions are those of the text,
so each block gets what a draft there would compute (Chen et al. 2026, arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.common.compat import CACHE_NAME
from hf_spec.methods.block.head import BlockHead, keys_values


def anchored_blocks(
    head: BlockHead, states: Sequence[Tensor], roots: Tensor, anchors: Tensor
) -> Tensor:
    """Return the (B, A, b, width) outputs of A blocks of each of B texts.

    Args:
        head: without causal or sliding layers, prepared by `use_plain_attention`.
        states: (B, T, H) hidden states, one tensor per layer that the head reads.
        roots: (B, A) int64, the first token of each block.
        anchors: (B, A) int64, the last position of each block's context.
    """
    size, (num_texts, num_blocks) = head.shape.block_size, anchors.shape
    context = head.context(states)
    tokens = torch.full((*anchors.shape, size), head.shape.mask_token_id, device=anchors.device)
    tokens[..., 0] = roots
    positions = anchors[..., None] + 1 + torch.arange(size, device=anchors.device)
    hidden = head.embed(tokens.view(num_texts, -1))
    rotation = head.rotary(hidden, positions.view(num_texts, -1))
    mask = visible(anchors, context.shape[1], size)
    cache = _context_cache(head, context)
    for layer in head.layers:
        hidden = layer(
            hidden,
            attention_mask=mask,
            position_embeddings=rotation,
            **{CACHE_NAME: cache},
        )
    return head.norm(hidden).view(num_texts, num_blocks, size, -1)


def visible(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """Return (B, 1, A * b, T + A * b) bool: keys of the context and blocks that a query sees."""
    num_texts, num_blocks = anchors.shape
    known = torch.arange(length, device=anchors.device) <= anchors[..., None]
    block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(block_size)
    together = (block[:, None] == block).expand(num_texts, -1, -1)
    return torch.cat([known.repeat_interleave(block_size, dim=1), together], dim=-1)[:, None]


def use_plain_attention(head: BlockHead) -> None:
    """Let the layers of a head take masks, instead of the steps of an engine."""
    for layer in head.layers:
        attention: Any = layer.self_attn
        attention.config._attn_implementation = "sdpa"


def _context_cache(head: BlockHead, context: Tensor) -> DynamicCache:
    """Return keys and values of (B, T, width) context vectors in all layers."""
    num_texts, length, _ = context.shape
    cos, sin = head.rotation(torch.arange(length, device=context.device))
    rotation = cos.repeat(num_texts, 1), sin.repeat(num_texts, 1)
    cache = DynamicCache()
    for index, layer in enumerate(head.layers):
        parts = keys_values(layer.self_attn, context.flatten(0, 1), rotation)
        keys, values = (part.unflatten(1, (num_texts, length)).transpose(0, 1) for part in parts)
        cache.update(keys, values, index)
    return cache
