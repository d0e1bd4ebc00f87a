"""Reference of `verify_tree`, with the walk on the host."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def verify_tree_ref(  # noqa: PLR0913 - logits and the fields of a tree
    logits: Tensor,
    token_ids: Tensor,
    parent: Tensor,
    row_start: Tensor,
    max_nodes: int,
    uniforms: Tensor | None = None,
    draft_probs: Tensor | None = None,
) -> Tensor:
    """Compute `verify_tree`; synchronizes with the device."""
    tokens, above, starts = token_ids.tolist(), parent.tolist(), row_start.tolist()
    draw, accept = uniforms, None
    if uniforms is not None and draft_probs is not None:
        draw, accept = uniforms.unbind(dim=1)
    packed = []
    for start, end in pairwise(starts):
        path: list[int] = []
        bonus, node = -1, start if start < end else None
        while node is not None:
            children = [n for n in range(start, end) if above[n] == node and tokens[n] >= 0]
            if draw is None:
                bonus = int(logits[node].argmax())
            else:
                target = logits[node].double().softmax(dim=-1)
                if draft_probs is not None and accept is not None:
                    drawn = [(tokens[n], float(accept[n])) for n in children]
                    target = _after_rejections(target, draft_probs[node].double(), drawn)
                bonus = _draw(target, float(draw[node]))
            node = next((n for n in children if tokens[n] == bonus), None)
            path += [] if node is None else [node]
        packed.append([len(path), bonus, *path, *[-1] * (max(max_nodes - 1, 0) - len(path))])
    return row_start.new_tensor(packed).view(len(packed), 2 + max(max_nodes - 1, 0))


def _after_rejections(target: Tensor, draft: Tensor, drawn: list[tuple[int, float]]) -> Tensor:
    """Return (V,) probabilities of the next token, given drawn tokens and uniforms to accept them.

    They are one-hot at an accepted token.
    """
    for token, uniform in drawn:
        if uniform * draft[token] < target[token]:
            return torch.zeros_like(target).index_fill(0, _index(token, target), 1.0)
        residual = (target - draft).clamp(min=0)
        # An empty residual means p = q up to rounding: a rejection there has no probability.
        target = residual / residual.sum() if residual.sum() > 0 else target
        draft = draft.index_fill(0, _index(token, draft), 0.0)
        draft = draft / draft.sum() if draft.sum() > 0 else draft
    return target


def _index(token: int, like: Tensor) -> Tensor:
    """Return a token as an index of one element."""
    return torch.tensor([token], device=like.device)


def _draw(probs: Tensor, uniform: float) -> int:
    """Sample by inverting the cumulative distribution of (V,) float64; -1 where it is undefined."""
    total = probs.cumsum(dim=-1)
    beyond = (total > uniform * total[-1]) & (probs > 0)
    return int(beyond.int().argmax()) if beyond.any() else -1
