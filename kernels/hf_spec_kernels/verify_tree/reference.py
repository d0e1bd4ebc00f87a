"""Reference of `verify_tree`, with the walk on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def verify_tree_ref(
    logits: Tensor,
    token_ids: Tensor,
    parent: Tensor,
    row_start: Tensor,
    max_nodes: int,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `verify_tree`; synchronizes with the device."""
    choice = (logits.argmax(dim=-1) if uniforms is None else _draw(logits, uniforms)).tolist()
    tokens, above, starts = token_ids.tolist(), parent.tolist(), row_start.tolist()
    num_rows = len(starts) - 1
    accepted = torch.full((num_rows, max(max_nodes - 1, 0)), -1)
    num_accepted, bonus = torch.zeros(num_rows).long(), torch.full((num_rows,), -1)
    for row in range(num_rows):
        nodes = range(starts[row], starts[row + 1])
        node = next(iter(nodes), None)
        while node is not None:
            bonus[row] = choice[node]
            node = next((n for n in nodes if above[n] == node and tokens[n] == bonus[row]), None)
            if node is not None:
                accepted[row, num_accepted[row]] = node
                num_accepted[row] += 1
    device = logits.device
    return accepted.to(device), num_accepted.to(device), bonus.to(device)


def _draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample (N,) int64 by inverting the cumulative distribution; -1 without any probability."""
    wide = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    top = wide.amax(dim=-1, keepdim=True)
    # An infinite logit gives finite ones probability 0.
    weights = torch.where(wide == top, 1.0, (wide - top).exp()) * (wide > -torch.inf)
    total = weights.cumsum(dim=-1)
    beyond = (total > uniforms.double()[:, None] * total[:, -1:]) & (weights > 0)
    drawn = beyond.int().argmax(dim=-1)
    return torch.where(beyond.any(dim=-1), drawn, -1)
