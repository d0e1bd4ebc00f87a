"""Refusals of lengths from which on a model computes otherwise than draft trees do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.errors import UnsupportedError

# Rotary scalings that look at the longest position of a forward, which a draft would shift.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_rope(model: PreTrainedModel, max_length: int | None) -> None:
    """Refuse rotary frequencies that a draft would change, for lengths where they change."""
    kind, limit = _length_dependent_rope(model)
    if kind is not None and (max_length is None or max_length > limit):
        raise UnsupportedError(
            f"rope_type={kind!r} changes its frequencies past {limit} tokens, so a draft would "
            f"change the output; keep max_length at {limit} or below (it is {max_length})"
        )


def check_index(model: PreTrainedModel, max_length: int | None) -> None:
    """Refuse layers that choose what a token sees, for lengths where they leave some out.

    An index says which earlier tokens matter most; all are chosen as long as they are no more than
    it may choose.
    """
    config: Any = model.config.get_text_config()
    indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    most = config.index_topk if indexed else None
    if most is not None and (max_length is None or max_length > most):
        raise UnsupportedError(
            f"{type(model).__name__} attends to no more than {most} tokens, chosen by an index "
            f"that draft trees do not have; keep max_length at {most} or below (it is {max_length})"
        )


def is_past_rope(model: PreTrainedModel, attention_mask: Tensor) -> bool:
    """Whether every row, by its (B, L) mask, begins past where rotary frequencies change once."""
    kind, limit = _length_dependent_rope(model)
    return kind == "longrope" and int(attention_mask.sum(dim=1).min()) > limit


def _length_dependent_rope(model: PreTrainedModel) -> tuple[str | None, int]:
    """The kind of rotary frequencies that follow from the length, and up to where they do not."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    rope = rope if isinstance(rope, Mapping) else {}
    kind = rope.get("rope_type", "default")
    limit = (
        getattr(config, "original_max_position_embeddings", None)
        or rope.get("original_max_position_embeddings")
        or getattr(config, "max_position_embeddings", None)
        or 0
    )
    return (kind if kind in LENGTH_DEPENDENT_ROPE else None), limit
