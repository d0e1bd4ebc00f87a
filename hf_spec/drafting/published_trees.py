"""The trees that papers printed or released, by name; `trees.json` has them level by level.

There "0010" is the path (0, 0, 1, 0), and "00{3-5}" the three paths (0, 0, 3) to (0, 0, 5). A name
is that of its method and what tells its trees apart, for instance "falcon-vicuna".
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hf_spec.drafting.rank_tree import Path, RankTree
from hf_spec.errors import OptionError, choices


@dataclass(frozen=True)
class PublishedTree:
    """A tree and what it was made for: k, the tokens predicted at once."""

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
