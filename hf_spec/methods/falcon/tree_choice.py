"""The tree of ranks that a Falcon head drafts: configured, its adapter's, or the default."""

from __future__ import annotations

from typing import Any

from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.drafting.rank_tree import RankTree, published_trees
from hf_spec.methods.falcon.head import METHOD, FalconHead


def choose_tree(named: Any, max_draft_tokens: int | None, head: FalconHead) -> RankTree:
    """Return the tree of `FalconConfig.tree` for a head, cut to a depth and to its vocabulary.

    Raises:
        OptionError: if the tree is deeper than the head was trained for, or made for another k.
        AssistantError: if the adapter's own tree is damaged.
    """
    tree = _whole_tree(named, max_draft_tokens, head).cut(max_draft_tokens, head.head.size)
    longest = max_depth(head)
    if longest is not None and tree.height > longest:
        raise OptionError(
            f"a tree of depth {tree.height} is deeper than the head was trained for ({longest}); "
            f"pass max_draft_tokens={longest} or a flatter tree"
        )
    return tree


def max_sent(named: Any, max_nodes: int | None, head: FalconHead) -> int | None:
    """Return how many nodes of a tree to send: configured or the adapter's; None for all."""
    if max_nodes is not None or named != "auto":
        return max_nodes
    return _stored(head, "max_nodes", "calibrate")


def max_depth(head: FalconHead) -> int | None:
    """Return the depth that a head was trained for; None if its adapter has none."""
    return _stored(head, "max_depth", "train")


def _stored(head: FalconHead, name: str, remedy: str) -> int | None:
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
