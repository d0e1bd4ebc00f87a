"""Options of `draft` (a chain) and `tree`; both use `DraftModelDrafter`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from transformers import PreTrainedModel

from hf_spec.drafting.config import AUTO
from hf_spec.drafting.cost_model.cost_model_drafter import with_policy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.draft_model.drafter import DraftModelConfig
from hf_spec.methods.draft_model.loading import find_draft
from hf_spec.methods.registry import register


def make_drafter(config: DraftModelConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    """Return the drafter of `draft` and `tree` configs, with its draft model loaded and checked."""
    draft = find_draft(config.strategy, assistant, target)
    make = partial(draft.drafter, target=target)
    return with_policy(config, target, make, config.shape.children)


@register("draft", make_drafter)
@dataclass(frozen=True)
class DraftConfig(DraftModelConfig):
    """Options of a chain from a draft model."""

    adapter_methods: ClassVar[tuple[str, ...] | None] = ("draft",)


def wide_tree(batching: str) -> TreeConfig:
    """Return the tree that a draft model grows for `auto`, which chooses the nodes to send."""
    return TreeConfig(max_draft_tokens=5, max_nodes=24, batching=batching)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    return make_drafter(wide_tree(batching), target, assistant)


@register("tree", make_drafter, _make_for_auto)
@dataclass(frozen=True)
class TreeConfig(DraftConfig):
    """Options of a tree from a draft model; `max_draft_tokens` is its depth.

    Attributes:
        children: most children per node.
        expanded_per_level: most nodes per level that get children, the most probable paths first.
        max_nodes: most nodes sent to the target, root excluded, the most probable paths first;
            "auto" lets the cost model choose; None is 15.
        min_probability: a node less probable than this gets no children.
        min_sibling_ratio: a child less probable than this share of its best sibling is dropped.
    """

    sizes: ClassVar[tuple[str, ...]] = ("max_draft_tokens", "max_nodes")
    usual = MappingProxyType({"max_draft_tokens": 5, "max_nodes": 15})
    longest = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 24})

    sample_drafts: bool = False
    children: int = 3
    expanded_per_level: int = 4
    max_nodes: int | str | None = AUTO
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("children", "expanded_per_level"):
            self.check(name, 1)
        for name in ("min_probability", "min_sibling_ratio"):
            self.check(name, 0, 1)
