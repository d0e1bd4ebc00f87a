"""Rank trees: invalid trees, cutting, the best tree, and the published trees."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.drafting.rank_tree import Path, RankTree, best_tree, published_trees

RAGGED = [(0,), (3,), (0, 0), (0, 5), (3, 1), (0, 0, 2), (3, 1, 0), (0, 0, 2, 0), (0, 0, 2, 7)]


def random_paths(seed: int, num_nodes: int = 25, num_ranks: int = 6) -> list[Path]:
    """Return a shuffled prefix-closed set with rank gaps and leaves at every depth."""
    generator = random.Random(seed)
    paths: list[Path] = []
    while len(paths) < num_nodes:
        path = (*generator.choice([(), *paths]), generator.randrange(num_ranks))
        if path not in paths and len(path) <= 9:
            paths.append(path)
    generator.shuffle(paths)
    return paths


class TestTree:
    def test_order_parents_and_depths(self) -> None:
        tree = RankTree.of(reversed(RAGGED))
        assert tree.paths == tuple(RAGGED)
        assert tree.parents == [-1, -1, 0, 0, 1, 2, 4, 5, 5]
        assert [len(path) for path in tree.paths] == [1, 1, 2, 2, 2, 3, 3, 4, 4]
        assert (len(tree), tree.height, tree.num_ranks) == (9, 4, 8)
        assert [tree.node_index[path] for path in tree.paths] == list(range(9))
        assert tree.inner == {(), (0,), (3,), (0, 0), (3, 1), (0, 0, 2)}

    def test_lists_as_json_gives_them(self) -> None:
        assert RankTree.of([[0, 1], [0]]) == RankTree.of(((0,), (0, 1)))

    def test_chain(self) -> None:
        assert RankTree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))

    @pytest.mark.parametrize("depth", range(6))
    def test_cut_to_a_depth(self, depth: int) -> None:
        tree = RankTree.of(RAGGED)
        cut = tree.cut(depth)
        assert cut.paths == tuple(path for path in tree.paths if len(path) <= depth)
        assert cut.paths == tree.paths[: len(cut)]

    def test_cut_to_short_lists_stays_a_tree(self) -> None:
        for seed in range(20):
            cut = RankTree.of(random_paths(seed)).cut(num_ranks=3)
            assert cut.num_ranks <= 3
            assert not cut.paths or RankTree.of(cut.paths) == cut

    @pytest.mark.parametrize(
        ("paths", "match"),
        [
            ([(0,), (1,), (0,)], r"path \[0\] is duplicated"),
            ([(0,), (1, 0)], r"path \[1, 0\] lacks its parent \[1\]"),
            ([(0, 0, 0), (0,)], r"lacks its parent \[0, 0\]"),
            ([(0,), (-1,)], r"\(-1,\) is not a rank path"),
            ([(0,), (0.0, 1)], "is not a rank path"),
            ([(True,)], "is not a rank path"),
            ([("0",)], "is not a rank path"),
            ([()], "is not a rank path"),
            ([0, 1], "0 is not a rank path"),
            ([], "has no nodes"),
            ("00", "must be a list"),
            ({(0,): 1}, "must be a list"),
            (3, "must be a list"),
            (None, "must be a list"),
        ],
    )
    def test_refusals(self, paths: Any, match: str) -> None:
        with pytest.raises(OptionError, match=match):
            RankTree.of(paths)


SHARES = ([0.6, 0.2, 0.05], [0.5, 0.1, 0.0], [0.4, 0.2, 0.1], [0.3, 0.05, 0.01])
ACCEPTED = {
    path: math.prod(shares[rank] for shares, rank in zip(SHARES, path, strict=False))
    for depth in range(1, 5)
    for path in itertools.product(range(3), repeat=depth)
}


class TestBestTree:
    @staticmethod
    def value(paths: Any) -> float:
        return 1.0 + sum(ACCEPTED[path] for path in paths)

    @pytest.mark.parametrize("block_size", [1, 2])
    @pytest.mark.parametrize("price", [(0.02, 0.05), (0.1, 0.3), (0.3, 0.01), (0.0, 0.5)])
    def test_no_tree_of_up_to_five_nodes_is_better(
        self, block_size: int, price: tuple[float, float]
    ) -> None:
        def cost(nodes: int, passes: int) -> float:
            return 1 + price[0] * nodes + price[1] * passes

        best = best_tree(ACCEPTED, cost, block_size, max_nodes=5)
        reached = self.value(best.paths) / cost(len(best), -(-best.height // block_size))
        trees: set[frozenset[Path]] = {frozenset()}
        for _ in range(5):
            larger = {
                tree | {path}
                for tree in trees
                for path in ACCEPTED
                if path not in tree and (len(path) == 1 or path[:-1] in tree)
            }
            for tree in larger:
                height = max(len(path) for path in tree)
                rate = self.value(tree) / cost(len(tree), -(-height // block_size))
                assert rate <= reached + 1e-12
            trees = larger

    def test_free_nodes_are_all_taken(self) -> None:
        tree = best_tree(ACCEPTED, lambda nodes, passes: 1.0, 2, max_nodes=20)
        assert len(tree) == 20
        assert RankTree.of(tree.paths) == tree

    def test_dear_passes_leave_one(self) -> None:
        tree = best_tree(ACCEPTED, lambda nodes, passes: float(passes) ** 3, 2, max_nodes=20)
        assert tree.height == 2

    def test_equal_values_still_make_a_tree(self) -> None:
        tree = best_tree({(0,): 1.0, (0, 0): 1.0, (0, 0, 0): 1.0}, lambda nodes, passes: 1.0, 1)
        assert tree == RankTree.chain(3)

    def test_nothing_to_gain(self) -> None:
        with pytest.raises(ValueError, match="ever accepted"):
            best_tree({(0,): 0.0}, lambda nodes, passes: 1.0, 1)


def test_every_method_sees_its_own() -> None:
    assert list(published_trees("falcon")) == ["falcon-vicuna", "falcon-llama"]
    assert list(published_trees("sdsat")) == [f"sdsat-{n}" for n in (5, 7, 9, 11, 13)]
    assert published_trees("draft") == {}
    assert published_trees("") == {}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("falcon-vicuna", [19, 15, 18, 22, 20, 22, 18, 22]),
        ("falcon-llama", [20, 19, 19, 15, 16, 10, 10, 9]),
    ],
)
def test_those_of_falcon(name: str, counts: list[int]) -> None:
    published = published_trees("falcon")[name]
    assert published.block_size == 2
    assert list(Counter(map(len, published.tree.paths)).values()) == counts


def test_spelled_paths() -> None:
    vicuna, llama = (published.tree.paths for published in published_trees("falcon").values())
    assert (18,) in vicuna
    assert (0,) * 7 + (11,) in vicuna
    assert (0, 10) in llama
    assert [path[2] for path in llama if path[:2] == (0, 1) and len(path) == 3] == [
        *[0, 3, 4, 5, 6, 7, 8, 9]
    ]


@pytest.mark.parametrize(("height", "num_nodes"), [(5, 28), (7, 36), (9, 46), (11, 60), (13, 76)])
def test_those_of_sdsat(height: int, num_nodes: int) -> None:
    published = published_trees("sdsat")[f"sdsat-{height}"]
    assert (len(published.tree), published.tree.height) == (num_nodes, height)
    assert published.block_size == height
