"""Reference of `filter_top_p`, by a sort as in `TopPLogitsWarper` of transformers."""

from __future__ import annotations

from torch import Tensor


def filter_top_p_ref(scores: Tensor, top_p: float, filter_value: float) -> Tensor:
    """Compute `filter_top_p`."""
    ascending, order = scores.sort(dim=-1, stable=True)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    removed[..., -1:] = False
    return scores.masked_fill(removed.scatter(-1, order, removed), filter_value)
