"""Rank trees: fixed draft shapes over ranked token lists, one list per depth.

The path (2, 0) is the best token of the second list, below the third best token of the first list.
The shape is the same in every round; only the tokens differ.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

from hf_spec.common.errors import OptionError, choices

Path = tuple[int, ...]


@dataclass(frozen=True)
class RankTree:
    """Rank tree without its root; `RankTree.of` validates it.

    Attributes:
        paths: one per node, sorted by depth and then by ranks. So the nodes down to any depth come
            first, and siblings are in order of rank.
    """

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: object) -> RankTree:
        """Return the tree with these rank paths; raise `OptionError` if they are not a tree."""
        if not isinstance(paths, Iterable) or isinstance(paths, (str, bytes, dict)):
            raise OptionError(f"tree={paths!r:.60} must be a list of rank paths such as [0, 1]")
        valid: set[Path] = set()
        for item in paths:
            path = tuple(item) if isinstance(item, (list, tuple)) else ()
            if not path or not all(type(rank) is int and rank >= 0 for rank in path):
                raise OptionError(
                    f"tree: {item!r:.60} is not a rank path; use a list of integers of at least 0, "
                    "one per depth"
                )
            if path in valid:
                raise OptionError(f"tree: the path {list(path)} is duplicated; remove one")
            valid.add(path)
        if not valid:
            raise OptionError("tree=[] has no nodes; the smallest tree is [[0]]")
        for path in valid:
            if len(path) > 1 and path[:-1] not in valid:
                raise OptionError(
                    f"tree: the path {list(path)} lacks its parent {list(path[:-1])}; add it"
                )
        return cls(tuple(sorted(valid, key=_order)))

    @classmethod
    def chain(cls, depth: int) -> RankTree:
        """Return the chain of the best tokens of `depth` lists."""
        return cls(tuple((0,) * d for d in range(1, depth + 1)))

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def node_index(self) -> dict[Path, int]:
        """Path -> index of its node."""
        return {path: index for index, path in enumerate(self.paths)}

    @cached_property
    def inner(self) -> set[Path]:
        """Paths of nodes that have children, including the root's."""
        return {path[:-1] for path in self.paths}

    @cached_property
    def parents(self) -> list[int]:
        """Index of each node's parent, -1 for a child of the root."""
        return [self.node_index.get(path[:-1], -1) for path in self.paths]

    @property
    def height(self) -> int:
        """Depth of the deepest node."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def num_ranks(self) -> int:
        """Number of tokens that the tree uses from its lists, at most."""
        return max((rank for path in self.paths for rank in path), default=-1) + 1

    def cut(self, depth: int | None = None, num_ranks: int | None = None) -> RankTree:
        """Return the tree without nodes below `depth` or of ranks from `num_ranks` on."""
        depth = self.height if depth is None else depth
        num_ranks = self.num_ranks if num_ranks is None else num_ranks
        return RankTree(tuple(p for p in self.paths if len(p) <= depth and max(p) < num_ranks))


def best_tree(
    accepted: Mapping[Path, float],
    cost: Callable[[int, int], float],
    block_size: int,
    max_nodes: int = 64,
) -> RankTree:
    """Return the tree with the most expected tokens per unit of cost.

    A round yields one token plus, per node, the share of rounds in which its whole path is
    `accepted`. For a fixed number of nodes and forward passes the cost is fixed, so taking the
    nodes with the largest shares is optimal; the function tries every number of both. The result
    is a tree, because no node has a larger share than its parent.

    Args:
        accepted: path -> share of rounds in which it is accepted.
        cost: cost of a round by (nodes without the root, forward passes of the drafter).
        block_size: depths per forward pass of the drafter.
        max_nodes: most nodes, root excluded.

    Raises:
        ValueError: if no path was ever accepted.
    """
    best: list[Path] = []
    best_rate = 0.0
    height = max(map(len, likeliest_paths(accepted)), default=0)
    for num_passes in range(1, -(-height // block_size) + 1):
        chosen = likeliest_paths(accepted, num_passes * block_size)[:max_nodes]
        gain = 1.0
        for count, path in enumerate(chosen, start=1):
            gain += accepted[path]
            rate = gain / cost(count, num_passes)
            if rate > best_rate:
                best, best_rate = chosen[:count], rate
    if not best:
        raise ValueError("no path in accepted was ever accepted; record more rounds")
    return RankTree.of(best)


def likeliest_paths(accepted: Mapping[Path, float], depth: int | None = None) -> list[Path]:
    """Return the accepted paths down to `depth`, in descending order of acceptance."""
    paths = [p for p in accepted if accepted[p] > 0 and (depth is None or len(p) <= depth)]
    return sorted(paths, key=lambda path: (-accepted[path], _order(path)))


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


@dataclass(frozen=True)
class PublishedTree:
    """Tree from a paper or its released code, for a drafter of `block_size` tokens at once.

    `trees.json` lists each tree level by level: "0010" is the path (0, 0, 1, 0), and "00{3-5}" are
    the paths (0, 0, 3) to (0, 0, 5). Names begin with the method, for example "falcon-vicuna".
    """

    block_size: int
    tree: RankTree


def published_trees(method: str) -> Mapping[str, PublishedTree]:
    """Return the published trees of a method by name, in the file's order."""
    return {name: tree for name, tree in _all_trees().items() if name.startswith(f"{method}-")}


def checked_tree(tree: Any, method: str, others: Sequence[str] = ()) -> Any:
    """Return the option `tree`, validated: rank paths, which are sorted, or a name.

    Names are those of the method's published trees and `others`. Anything else raises
    `OptionError`.
    """
    if not isinstance(tree, str):
        return RankTree.of(tree).paths
    names = [*others, *published_trees(method)]
    if tree not in names:
        raise OptionError(
            f"unknown tree {tree!r}; {choices(tree, names)}, or a list of rank paths such as "
            "[[0], [0, 0], [1]]"
        )
    return tree


@functools.cache
def _all_trees() -> Mapping[str, PublishedTree]:
    text = resources.files("hf_spec.drafting").joinpath("trees.json").read_text("utf-8")
    trees = {}
    for name, entry in json.loads(text).items():
        words = [word for level in entry["depths"] for word in level.split()]
        paths = [path for word in words for path in _parse_paths(word)]
        trees[name] = PublishedTree(entry["block_size"], RankTree.of(paths))
    return trees


def _parse_paths(word: str) -> list[Path]:
    match = re.fullmatch(r"(\d*)(?:\{(\d+)-(\d+)\})?", word)
    assert match is not None, f"trees.json: {word!r}"
    digits, first, last = match.groups()
    stem = tuple(int(digit) for digit in digits)
    return [stem] if first is None else [(*stem, r) for r in range(int(first), int(last) + 1)]
