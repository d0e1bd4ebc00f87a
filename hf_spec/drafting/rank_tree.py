"""Trees of ranks: the fixed shape of drafts that take their tokens from lists.

A path (2, 0) is the best token of the second list below the third best token of the first one. The
shape is the same in every round; only the tokens differ.
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
    """A tree of ranks without its root; made by `RankTree.of`, which checks it.

    Attributes:
        paths: one per node, by depth and then by ranks, so that the nodes down to any depth come
            first and siblings stand in order of rank.
    """

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: object) -> RankTree:
        """A tree from its rank paths, in any order; what is no tree is refused (`OptionError`)."""
        if not isinstance(paths, Iterable) or isinstance(paths, (str, bytes, dict)):
            raise OptionError(f"tree={paths!r:.60} must be a list of rank paths such as [0, 1]")
        known: set[Path] = set()
        for given in paths:
            path = tuple(given) if isinstance(given, (list, tuple)) else ()
            if not path or not all(type(rank) is int and rank >= 0 for rank in path):
                raise OptionError(
                    f"tree: {given!r:.60} is no rank path: whole numbers from 0, one a depth"
                )
            if path in known:
                raise OptionError(f"tree: the path {list(path)} is given twice")
            known.add(path)
        if not known:
            raise OptionError("tree=[] has no nodes; the smallest tree is [[0]]")
        for path in known:
            if len(path) > 1 and path[:-1] not in known:
                raise OptionError(
                    f"tree: the path {list(path)} lacks its parent {list(path[:-1])}; add it"
                )
        return cls(tuple(sorted(known, key=_order)))

    @classmethod
    def chain(cls, depth: int) -> RankTree:
        """The best token of every list, `depth` of them."""
        return cls(tuple((0,) * d for d in range(1, depth + 1)))

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def depths(self) -> list[int]:
        """Per node how deep it lies, 1 for a child of the root."""
        return [len(path) for path in self.paths]

    @cached_property
    def places(self) -> dict[Path, int]:
        """Per path the index of its node."""
        return {path: index for index, path in enumerate(self.paths)}

    @cached_property
    def inner(self) -> set[Path]:
        """The paths of nodes that have children, and the root's."""
        return {path[:-1] for path in self.paths}

    @cached_property
    def parents(self) -> list[int]:
        """Per node the index of its parent, -1 for a child of the root."""
        return [self.places.get(path[:-1], -1) for path in self.paths]

    @property
    def height(self) -> int:
        """Depth of the deepest node."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def num_ranks(self) -> int:
        """Length of the longest list that is read."""
        return max((rank for path in self.paths for rank in path), default=-1) + 1

    def cut(self, depth: int | None = None, num_ranks: int | None = None) -> RankTree:
        """The part of the tree down to a depth, over lists of a length; may have no nodes."""
        deepest = self.height if depth is None else depth
        most = self.num_ranks if num_ranks is None else num_ranks
        return RankTree(tuple(p for p in self.paths if len(p) <= deepest and max(p) < most))


def best_tree(
    accepted: Mapping[Path, float],
    cost: Callable[[int, int], float],
    block_size: int,
    max_nodes: int = 64,
) -> RankTree:
    """The tree with the most tokens per time, from measured acceptance; a `ValueError` without any.

    A node is worth the share of rounds in which its whole path is `accepted`; a round yields one
    token and the sum over its nodes. For a fixed number of nodes and of passes, of `block_size`
    depths each, the `cost` is fixed, so the sum alone decides, and taking the most valuable nodes
    one by one is exact: no other set of as many nodes has a larger sum, and it is a tree, since no
    node is worth more than its parent. What remains is to try every (nodes without the root,
    passes).
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
        raise ValueError("accepted: no path is ever accepted")
    return RankTree.of(best)


def likeliest_paths(accepted: Mapping[Path, float], depth: int | None = None) -> list[Path]:
    """The paths that are ever accepted, the most accepted first, down to a depth."""
    found = [p for p in accepted if accepted[p] > 0 and (depth is None or len(p) <= depth)]
    return sorted(found, key=lambda path: (-accepted[path], _order(path)))


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


@dataclass(frozen=True)
class PublishedTree:
    """A tree and what it was made for: k, the tokens predicted at once.

    `trees.json` has those that papers printed or released, level by level: "0010" is the path
    (0, 0, 1, 0), and "00{3-5}" the three paths (0, 0, 3) to (0, 0, 5). A name is that of its method
    and what tells its trees apart, for instance "falcon-vicuna".
    """

    block_size: int
    tree: RankTree


def published_trees(method: str) -> Mapping[str, PublishedTree]:
    """The trees of one method by name, in the file's order; none for a method without any."""
    return {name: tree for name, tree in _all_trees().items() if name.startswith(f"{method}-")}


def checked_tree(given: Any, method: str, others: Sequence[str] = ()) -> Any:
    """The option `tree`, checked: a name of the method, one of `others`, or rank paths."""
    if not isinstance(given, str):
        return RankTree.of(given).paths
    known = [*others, *published_trees(method)]
    if given not in known:
        raise OptionError(
            f"unknown tree {given!r}; {choices(given, known)}, or a list of rank paths such as "
            "[[0], [0, 0], [1]]"
        )
    return given


@functools.cache
def _all_trees() -> Mapping[str, PublishedTree]:
    text = resources.files("hf_spec.drafting").joinpath("trees.json").read_text("utf-8")
    trees = {}
    for name, entry in json.loads(text).items():
        words = [word for level in entry["depths"] for word in level.split()]
        paths = [path for word in words for path in _spell(word)]
        trees[name] = PublishedTree(entry["block_size"], RankTree.of(paths))
    return trees


def _spell(word: str) -> list[Path]:
    found = re.fullmatch(r"(\d*)(?:\{(\d+)-(\d+)\})?", word)
    assert found is not None, f"trees.json: {word!r}"
    digits, first, last = found.groups()
    stem = tuple(int(digit) for digit in digits)
    return [stem] if first is None else [(*stem, r) for r in range(int(first), int(last) + 1)]
