"""Drafts a fixed tree of ranks with a Falcon head, k levels per pass (arXiv 2412.12639, sec. 3.4).

The newest k outputs of the head give a list of tokens for each of the next k depths. The tree fixes
which entries of the lists are nodes, and which nodes become blocks of the next pass. Within a block
the list of a depth does not depend on the tokens above it.

The draft depends on committed tokens and features only, so node draw verifies it.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter
from hf_spec.backend.device.transfer import send
from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.drafting.config import AUTO, PolicyConfig
from hf_spec.drafting.cost_model.adaptive_length_drafter import (
    adapt_length,
    resolve_config,
    selects_nodes_by_cost,
)
from hf_spec.drafting.cost_model.draft_source import NODES_PER_LEVEL
from hf_spec.drafting.length_policy import MEASURED, LengthPolicy, make_policy
from hf_spec.drafting.level_drafter import LevelConfig
from hf_spec.drafting.rank_tree import RankTree, checked_tree, published_trees
from hf_spec.drafting.token_graph import UnmergedTree
from hf_spec.drafting.tree_growth import Growth, NextTokens, RowGrowth, TreeShape
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.forward.draft_tree import likeliest
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.methods.falcon.head import METHOD, FalconHead
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.feature_pairs.runner import check_packed
from hf_spec.methods.loading import adapter_module
from hf_spec.methods.registry import register


def _make(config: FalconConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    check_packed(target)
    head = resolve_falcon_head(assistant, target)
    by_cost = selects_nodes_by_cost(config, target)
    config = resolve_config(config, target)
    tree = choose_tree(config.tree, config.max_draft_tokens, head)
    if config.max_draft_tokens is None and config.length_policy != "disco":
        config = replace(config, max_draft_tokens=tree.height)
    policy = make_policy(config, target)
    max_nodes = config.max_nodes if isinstance(config.max_nodes, int) else None
    most_sent = max_nodes
    if max_nodes is None and config.tree == "auto":
        most_sent = _stored_option(head, "max_nodes", "calibrate")
    if config.length_policy == MEASURED or by_cost:
        drafter = FalconDrafter(head, tree, policy, config.min_draft_tokens)
        config = replace(config, max_nodes=max_nodes or len(tree))
        return adapt_length(drafter, target, config, NODES_PER_LEVEL)
    return FalconDrafter(head, tree, policy, config.min_draft_tokens, most_sent)


@register("falcon", _make)
@dataclass(frozen=True)
class FalconConfig(PolicyConfig):
    """Options of a Falcon head's drafts; the length policy may stop them between passes.

    Attributes:
        max_draft_tokens: depth at which the tree is cut; None leaves it whole.
        tree: "auto", the adapter's own tree or, without one, a chain of two passes with a few
            siblings; "chain"; a published one for k = 2, "falcon-vicuna" or "falcon-llama"; or a
            list of rank paths, see `hf_spec.drafting.rank_tree`.
        max_nodes: most nodes of a drafted tree to send, the most probable paths first, chosen again
            in every round (compare Li et al. 2024, arXiv 2406.16858, section 4.2). "auto" chooses
            the number by cost for the adapter's own tree; None is the calibrated number. Of other
            trees both send all nodes.
    """

    adapter_methods = (METHOD,)
    sizes = ("tree", "max_draft_tokens", "max_nodes")

    # Trees and adapters have sizes of their own.
    usual = MappingProxyType({})
    longest = MappingProxyType({})

    tree: Any = "auto"
    max_nodes: int | str | None = AUTO

    @property
    def selects_nodes_by_cost(self) -> bool:
        """True only for the adapter's own tree; other trees are sent as configured."""
        return super().selects_nodes_by_cost and self.tree == "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("max_nodes", 1)
        object.__setattr__(self, "tree", checked_tree(self.tree, METHOD, ("auto", "chain")))


class FalconDrafter(PairDrafter):
    """Drafts a rank tree with a Falcon head in evaluation mode, k levels per pass.

    `policy` is applied between passes; by default the whole tree is drafted. `max_nodes` of a row,
    the most probable paths, are sent; None sends all.
    """

    counted = ("draft_nodes", "rounds")
    assisted_refusal_reason = (
        "a Falcon head needs the target's features, which assisted decoding does not provide; use "
        "spec_strategy='falcon'"
    )
    head: FalconHead
    # From `start` on, `index` and `order` of each of `_lists` on the head's device.
    _indices: list[tuple[Tensor | None, Tensor | None]]

    def __init__(
        self,
        head: FalconHead,
        tree: RankTree,
        policy: LengthPolicy | None = None,
        min_draft_tokens: int = 1,
        max_nodes: int | None = None,
    ):
        config = LevelConfig(min_draft_tokens=min_draft_tokens)
        size = head.shape.block_size
        shape = TreeShape(tree=tree, whole=True, levels_per_pass=size)
        super().__init__(config, head, policy or LengthPolicy(tree.height), shape)
        self.tree = tree
        self.max_depth = min(tree.height, self.max_depth)
        self.max_nodes = max_nodes
        self._lists = used_lists(tree, size)

    def num_forwards(self, depth: int) -> int:
        """Return one for every k levels."""
        return -(-depth // self.head.shape.block_size)

    def start(self, state: GenerationState) -> None:
        """Begin with rows without pairs."""
        super().start(state)
        # The head's distributions are used as they are.
        self.processors = NodeProcessors([], state.num_rows)
        # On the head's device as long as the head lives: CUDA graphs of the head read them.
        key = "lists of ranks", self.tree, self.draft_device
        self._indices = cached_per_model(self.head.attention, key, self._send_indices)

    def _send_indices(self) -> list[tuple[Tensor | None, Tensor | None]]:
        indices = [index for lists in self._lists for index in (lists.index, lists.order)]
        sent = iter(send([i for i in indices if i is not None], self.draft_device))
        on_device = [None if index is None else next(sent) for index in indices]
        return list(zip(on_device[::2], on_device[1::2], strict=True))

    def next_tokens(self, state: GenerationState, growth: Growth) -> NextTokens:
        """Return the lists of the next k levels below each node, from one pass."""
        size, num_rows = self.head.shape.block_size, len(growth.rows)
        number = growth.depth // size
        lists, (index, order) = self._lists[number], self._indices[number]
        outputs = self.run_blocks(state, growth).view(num_rows, -1, self.head.hidden_size)
        if index is not None:
            outputs = outputs[:, index]
        num_ranks = self.shape.num_ranks
        tokens, chances, probs = self._runner.top_tokens(outputs.flatten(0, 1), num_ranks)
        self._num_choices = probs.shape[-1]
        scores: Tensor | None = None
        if self.policy_stops:
            depths = [growth.depth + output % size for output in lists.outputs]
            positions = [state.generated[row] + depth for row in growth.rows for depth in depths]
            scores = self.policy.score(probs, positions)

        def by_level(part: Tensor) -> Tensor:
            by_row = part.view(num_rows, len(lists.outputs), *part.shape[1:])
            by_row = by_row if order is None else by_row[:, order]
            return by_row.reshape(-1, lists.num_levels, *part.shape[1:])

        scored = None if scores is None else by_level(scores)
        return NextTokens(by_level(tokens), by_level(chances), scores=scored)

    def choose_nodes(self, draft: RowGrowth, limit: int) -> UnmergedTree:
        """Return the most probable nodes of a draft, in the order of the tree."""
        graph = draft.graph
        nodes, parents = likeliest(graph.parents, graph.probs, self.max_nodes)
        return UnmergedTree(
            [graph.tokens[node] for node in nodes],
            parents,
            nodes,
            [False] * len(nodes),
            [graph.probs[node] for node in nodes],
        )


@dataclass(frozen=True)
class UsedLists:
    """The lists of a pass over n blocks that a tree takes tokens from.

    Attributes:
        num_levels: levels of the tree that the pass predicts, k or fewer.
        outputs: which of the n * k outputs are read as lists.
        index: `outputs` as int64; None for all.
        order: (n * num_levels,) int64, the index in `outputs` of the list of each level of each
            block, 0 for lists that are not read; None if that is their order.
    """

    num_levels: int
    outputs: list[int]
    index: Tensor | None
    order: Tensor | None


@functools.lru_cache(maxsize=64)
def used_lists(tree: RankTree, block_size: int) -> tuple[UsedLists, ...]:
    """Return what each pass over a tree reads, with a head that predicts `block_size` levels."""
    passes = []
    for depth in range(0, tree.height, block_size):
        num_levels = min(block_size, tree.height - depth)
        blocks = [path for path in ((), *tree.paths) if len(path) == depth and path in tree.inner]
        read = {(path[:depth], len(path) - depth) for path in tree.paths if len(path) > depth}
        slots = [(number, step) for number in range(len(blocks)) for step in range(num_levels)]
        used = [(number, step) for number, step in slots if (blocks[number], step + 1) in read]
        index_of = {slot: number for number, slot in enumerate(used)}
        outputs = [number * block_size + step for number, step in used]
        passes.append(
            UsedLists(
                num_levels,
                outputs,
                torch.tensor(outputs) if len(outputs) < len(blocks) * block_size else None,
                torch.tensor([index_of.get(s, 0) for s in slots]) if used != slots else None,
            )
        )
    return tuple(passes)


def resolve_falcon_head(assistant: object, target: PreTrainedModel) -> FalconHead:
    """Return the Falcon head for `assistant`; an unsuitable one raises `AssistantError`."""
    if isinstance(assistant, (str, os.PathLike, SpecAdapter)):
        head: FalconHead = adapter_module(assistant, METHOD, target)
        return head
    if not isinstance(assistant, FalconHead):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is not a Falcon head; pass the folder "
            "or Hub id of a Falcon adapter, made by `hf-spec train falcon`, or a FalconHead"
        )
    assistant.base.check(target)
    if assistant.training:
        raise AssistantError("the Falcon head is in training mode; call eval() on it")
    device = assistant.attention.device
    if device != target.device:
        raise AssistantError(
            f"the Falcon head is on {device}, the model on {target.device}; move the head there"
        )
    return assistant


def choose_tree(named: Any, max_draft_tokens: int | None, head: FalconHead) -> RankTree:
    """Return the tree of `FalconConfig.tree` for a head, cut to a depth and to its vocabulary."""
    tree = _whole_tree(named, max_draft_tokens, head).cut(max_draft_tokens, head.head.size)
    longest = max_depth(head)
    if longest is not None and tree.height > longest:
        raise OptionError(
            f"a tree of depth {tree.height} is deeper than the head was trained for ({longest}); "
            f"pass max_draft_tokens={longest} or a flatter tree"
        )
    return tree


def max_depth(head: FalconHead) -> int | None:
    """Return the depth that a head was trained for; None if its adapter has none."""
    return _stored_option(head, "max_depth", "train")


def _stored_option(head: FalconHead, name: str, remedy: str) -> int | None:
    value = head.options.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise AssistantError(f"the Falcon adapter has {name}={value!r}; {remedy} it again")
    return value


def _whole_tree(named: Any, max_draft_tokens: int | None, head: FalconHead) -> RankTree:
    size = head.shape.block_size
    default_depth = min(2 * size, max_depth(head) or 2 * size)
    if not isinstance(named, str):
        return RankTree(named)
    if named == "chain":
        return RankTree.chain(max_draft_tokens or default_depth)
    if named != "auto":
        published = published_trees(METHOD)[named]
        if published.block_size != size:
            raise OptionError(
                f"tree={named!r} is for heads with block_size {published.block_size}; this one has "
                f"{size}: pass tree='auto', 'chain' or rank paths"
            )
        return published.tree
    stored_tree = head.options.get("tree")
    if stored_tree is None:
        # On a CPU a small model verifies 8 nodes at nearly the cost of one token.
        chain = RankTree.chain(default_depth).paths
        return RankTree.of([*chain, (1,), (2,), *[(0, 1)][: default_depth - 1]])
    try:
        tree = RankTree.of(stored_tree)
    except (OptionError, TypeError) as error:
        raise AssistantError(f"the Falcon adapter's tree cannot be used: {error}") from error
    if tree.height > (max_depth(head) or tree.height):
        raise AssistantError(
            f"the Falcon adapter's tree cannot be used: it is {tree.height} deep, its head was "
            f"trained for {max_depth(head)}; calibrate it again"
        )
    return tree
