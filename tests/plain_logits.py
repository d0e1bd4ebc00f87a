"""Reference logits of draft tree nodes: plain forward passes over each path alone."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import DraftTree


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Return the tokens from below the root down to the node."""
    path: list[int] = []
    while tree.parent[node] >= 0:
        path.insert(0, tree.tokens[node])
        node = tree.parent[node]
    return path


def alone(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return (V,) logits after the tokens, from one plain forward pass."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def expected_logits(model: PreTrainedModel, tree: DraftTree, rows: list[list[int]]) -> Tensor:
    """Return (N, V) reference logits of all nodes."""
    return torch.stack(
        [
            alone(model, tokens + path_to(tree, node))
            for row, tokens in enumerate(rows)
            for node in tree.nodes(row)
        ]
    )
