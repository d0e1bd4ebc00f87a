"""Random Falcon heads, and reference drafts recomputed from whole texts without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.methods.falcon.head import FalconHead, FalconShape
from tests.tiny_models import DEVICE, build

# (model, block size, recurrent) of the heads for tests that compare single drafts.
HEADS = [
    ("llama", 1, False),
    ("llama", 2, True),
    ("llama", 3, False),
    ("llama", 4, True),
    ("gemma3", 2, False),
    ("gemma3", 3, True),
]


@cache
def random_head(
    name: str,
    block_size: int = 2,
    num_layers: int = 2,
    recurrent: bool = False,
    fused: bool = False,
) -> FalconHead:
    """Return a head with random weights for the named model, cached; do not change it."""
    torch.manual_seed(5)
    head = FalconHead(build(name), FalconShape(block_size, num_layers, recurrent, fused), None)
    # Otherwise the LSTM's output hardly depends on its inputs, which would hide mistakes.
    with torch.no_grad():
        for parameter in head.mixer.parameters():
            parameter.mul_(4)
        if head.earlier is not None:
            head.earlier.up.weight.normal_()
    return head.requires_grad_(False).eval().to(DEVICE)


@torch.no_grad()
def features_of(
    model: PreTrainedModel, tokens: Sequence[int], head: FalconHead | None = None
) -> Tensor:
    """Return (T, H) last hidden states of the target; a fused `head` adds earlier layers."""
    ids = torch.tensor([list(tokens)], device=model.device)
    states = model(ids, output_hidden_states=True).hidden_states
    if head is None or head.earlier is None:
        return states[-1][0]
    part, count = head.earlier, model.config.get_text_config().num_hidden_layers
    joined = torch.cat([states[layer][0] for layer in (2, count // 2, count - 3)], dim=-1)
    added = joined * part.enter @ part.down.weight.T @ part.up.weight.T * part.leave
    return states[-1][0] + added


def block_ends(count: int, block_size: int, before: Sequence[int] = ()) -> list[int]:
    """Return the end of every pair's block when `count` pairs are known.

    Args:
        count: pairs that have a feature.
        block_size: k.
        before: block ends after the previous round. Pairs keep their blocks unless fed again.
    """
    begin = min(len(before), count - block_size)
    fed = range(begin, count)
    return [*before[:begin], *(count - (count - 1 - i) // block_size * block_size for i in fed)]


@torch.no_grad()
def predicted(
    head: FalconHead, tokens: Sequence[int], features: Tensor, path: Sequence[int], ends: list[int]
) -> Tensor:
    """Return the (k, H) outputs after a text and a drafted path of whole blocks, without a cache.

    Args:
        head: block size k, at most two layers. With more, feeding a pair again would change the
            inputs of the pairs before it.
        tokens: all committed tokens, the root last.
        features: features of the newest tokens, without the root.
        path: m * k drafted tokens.
        ends: end of the block of every feature.
    """
    size = head.shape.block_size
    known, start = features, len(tokens) - len(features)
    for _ in range(len(path) // size + 1):
        known = extended(head, [*tokens, *path], start, known, ends)
    return known[-size:]


@torch.no_grad()
def extended(
    head: FalconHead, text: Sequence[int], start: int, known: Tensor, ends: list[int]
) -> Tensor:
    """Return the known features of a text's pairs and k more that the head predicts from them."""
    size, count = head.shape.block_size, len(known)
    # Blocks of predicted features follow after the known ones.
    ends = [*ends, *(end for end in range(len(ends) + size, count + 1, size) for _ in range(size))]
    mixed, _ = head.mix(torch.tensor([text[start : start + count]]), known[None])
    visible = torch.arange(count) < torch.tensor(ends)[:, None]
    masks: Any = head._masks(visible, mixed.dtype)
    positions = torch.arange(start - 1, start - 1 + count)[None]
    outputs = head.attend(mixed, attention_mask=masks, position_ids=positions)
    return torch.cat([known, outputs[0, -size:]])


def drafted(
    head: FalconHead,
    tokens: Sequence[int],
    features: Tensor,
    paths: Sequence[Sequence[int]],
    ends: list[int],
) -> dict[tuple[int, ...], tuple[int, float]]:
    """Return (token, probability) of each rank path, each list recomputed from the whole text."""
    size = head.shape.block_size
    lists: dict[tuple[int, ...], Any] = {}
    known = {(): extended(head, tokens, len(tokens) - len(features), features, ends)}
    found: dict[tuple[int, ...], tuple[int, float]] = {}
    for path in sorted(map(tuple, paths), key=len):
        start = path[: (len(path) - 1) // size * size]
        if start not in lists:
            if start:
                above = [found[start[:depth]][0] for depth in range(1, len(start) + 1)]
                text, before = [*tokens, *above], known[start[:-size]]
                known[start] = extended(head, text, len(tokens) - len(features), before, ends)
            probs = head.head.draft_logits(known[start][-size:]).float().softmax(dim=-1)
            lists[start] = probs.sort(dim=-1, descending=True, stable=True)
        chances, indices = lists[start]
        slot, rank = len(path) - len(start) - 1, path[-1]
        found[path] = int(head.head.tokens(indices[slot, rank])), float(chances[slot, rank])
    return found
