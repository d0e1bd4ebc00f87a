"""Heads that propose several levels at once, Medusa, MLP speculators and blocks: their options.

A tree depends only on committed tokens and features, so it is verified by node draw. By default the
most probable paths are sent; a fixed tree of ranks can be given instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError
from hf_spec.drafting.cost_model.adaptive_length_drafter import (
    adapt_length,
    resolve_config,
    selects_nodes_by_cost,
)
from hf_spec.drafting.cost_model.draft_source import NODES_PER_LEVEL
from hf_spec.drafting.length_policy import MEASURED, make_policy
from hf_spec.drafting.one_pass_drafter import ProposalDrafter, ProposalRunner
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.drafting.tree_growth import TreeShape
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.methods.draft_model.drafter import TreeConfig


class OnePassHead(nn.Module):
    """A `ProposalHead` of one pass for all levels."""

    hidden_layers: tuple[int, ...] = (-1,)
    num_levels: int

    @property
    def timing_key(self) -> int:
        """The head."""
        return id(self)

    def num_forwards(self, depth: int) -> int:
        """Return 1: one pass proposes any number of levels."""
        return 1


@dataclass(frozen=True)
class ProposalConfig(TreeConfig):
    """Options of drafts from a head that proposes several levels at once.

    Attributes:
        max_draft_tokens: maximum depth; None for all levels that the head proposes.
        tree: a list of rank paths, see `hf_spec.drafting.rank_tree`, that replaces `children`,
            `expanded_per_level` and the other shape options. It is never sampled.
        max_nodes: most nodes sent to the target, the most probable paths first; "auto" lets the
            cost model choose; None is 24. A `tree` is sent as a whole.
    """

    adapter_methods = ()
    sizes = ("max_draft_tokens", "max_nodes", "tree")
    usual = MappingProxyType({"max_nodes": 24})
    longest = MappingProxyType({"max_nodes": 32})

    tree: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None:
            object.__setattr__(self, "tree", RankTree.of(self.tree).paths)

    @property
    def shape(self) -> TreeShape:
        """Shape of the configured tree."""
        return replace(super().shape, tree=None if self.tree is None else RankTree(self.tree))


def make_proposal_drafter(
    config: ProposalConfig,
    head: OnePassHead,
    make_runner: Callable[[GenerationState], ProposalRunner],
    target: PreTrainedModel,
) -> Drafter:
    """Return the drafter of a head; `make_runner` returns its runner for a generation.

    A configured draft that is deeper than the head proposes raises `OptionError`.
    """
    depth = config.max_draft_tokens or (RankTree(config.tree).height if config.tree else 0)
    if depth > head.num_levels:
        raise OptionError(
            f"a draft of {depth} tokens is deeper than the {head.num_levels} levels of the head; "
            f"pass max_draft_tokens={head.num_levels} or a flatter tree"
        )
    selects_by_cost = selects_nodes_by_cost(config, target)
    if config.tree is not None and not isinstance(config.max_nodes, int):
        config = replace(config, max_nodes=len(config.tree))
    config = resolve_config(config, target)
    if config.max_draft_tokens is None and config.length_policy != "disco":
        config = replace(config, max_draft_tokens=depth or head.num_levels)
    policy = make_policy(config, target)
    drafter = ProposalDrafter(config, head, make_runner, policy)
    if config.length_policy != MEASURED and not selects_by_cost:
        return drafter
    width = min(config.shape.children, NODES_PER_LEVEL)
    return adapt_length(drafter, target, config, width)
