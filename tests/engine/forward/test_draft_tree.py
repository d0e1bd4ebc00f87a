"""Draft trees: construction, ancestor masks against a walk up the parents, likeliest nodes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_spec.engine.forward.draft_tree import DraftTree, Verdict, likeliest

CHAIN = ([5, 6, 7], [-1, 0, 1])
FORK = ([9, 8, 8, 4, 3], [-1, 0, 0, 1, 2])
NOTHING: tuple[list[int], list[int]] = ([], [])


def random_rows(seed: int, num_rows: int) -> list[tuple[list[int], list[int]]]:
    """Return trees of 0 to 12 nodes with random parents."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        size = rng.choice([0, 1, 2, 5, 12])
        parents = [rng.randrange(node) if node else -1 for node in range(size)]
        rows.append(([rng.randrange(50) for _ in range(size)], parents))
    return rows


def ancestors(parent: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parent[node]
    return found


def test_probabilities_are_carried_along() -> None:
    draft_probs, node_probs = torch.rand(3, 10), [1.0, 0.5, 0.2]
    tree = DraftTree.from_rows([CHAIN], draft_probs=draft_probs, node_probs=node_probs)
    assert tree.draft_probs is draft_probs
    assert tree.node_probs is node_probs
    assert DraftTree.from_rows([CHAIN]).node_probs is None


def test_from_rows_lays_the_rows_one_after_the_other() -> None:
    tree = DraftTree.from_rows([CHAIN, NOTHING, FORK])
    assert (tree.num_rows, tree.num_nodes) == (3, 8)
    assert tree.tokens == [5, 6, 7, 9, 8, 8, 4, 3]
    assert tree.parent == [-1, 0, 1, -1, 3, 3, 4, 5]
    assert tree.depth == [0, 1, 2, 0, 1, 1, 2, 2]
    assert tree.row_start == [0, 3, 3, 8]
    assert [list(tree.nodes(row)) for row in range(3)] == [[0, 1, 2], [], [3, 4, 5, 6, 7]]
    assert [tree.height(row) for row in range(3)] == [2, 0, 2]


def test_rows_that_are_left_out_have_no_nodes() -> None:
    probs = [1.0, 0.5, 0.2]
    tree = DraftTree.from_drafts({1: CHAIN}, 3, node_probs=probs)
    whole = DraftTree.from_rows([NOTHING, CHAIN, NOTHING])
    assert (tree.tokens, tree.parent, tree.depth) == (whole.tokens, whole.parent, whole.depth)
    assert tree.row_start == whole.row_start == [0, 0, 3, 3]
    assert tree.node_probs is probs


def test_from_rows_without_any_node() -> None:
    tree = DraftTree.from_rows([NOTHING, NOTHING])
    assert (tree.num_rows, tree.num_nodes) == (2, 0)
    assert tree.ancestor_mask.shape == (0, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (([1, 2], [-1]), "row 1 has 2 tokens and 1 parents"),
        (([1, 2], [0, 0]), "row 1: node 0 cannot have parent 0"),
        (([1, 2], [-1, -1]), "row 1: node 1 cannot have parent -1"),
        (([1, 2], [-1, 1]), "row 1: node 1 cannot have parent 1"),
        (([1, 2, 3], [-1, 2, 0]), "row 1: node 1 cannot have parent 2"),
    ],
    ids=["lengths", "no root", "two roots", "own parent", "parent after child"],
)
def test_from_rows_refuses_what_is_no_tree(row: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree.from_rows([CHAIN, row])


@pytest.mark.parametrize("seed", range(8))
def test_ancestor_mask_is_the_walk_up_the_parents(seed: int) -> None:
    tree = DraftTree.from_rows(random_rows(seed, num_rows=1 + seed % 4))
    row = [index for index in range(tree.num_rows) for _ in tree.nodes(index)]
    widest = max(len(tree.nodes(index)) for index in range(tree.num_rows))
    expected = torch.zeros(tree.num_nodes, widest, dtype=torch.bool)
    for node in range(tree.num_nodes):
        expected[
            node, [above - tree.row_start[row[node]] for above in ancestors(tree.parent, node)]
        ] = True
    assert torch.equal(tree.ancestor_mask, expected)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 33])
def test_ancestor_mask_of_a_chain_is_causal(length: int) -> None:
    tree = DraftTree.from_rows([(list(range(length)), list(range(-1, length - 1)))])
    assert torch.equal(tree.ancestor_mask, torch.ones(length, length).tril().bool())


def test_children_keep_their_rank_and_are_found_by_token() -> None:
    tree = DraftTree.from_rows([CHAIN, FORK])
    assert tree.children == [[1], [2], [], [4, 5], [6], [7], [], []]
    assert tree.child(3, 8) == 4, "the first of two equal children"
    assert tree.child(4, 4) == 6
    assert tree.child(4, 3) is None
    assert tree.child(2, 5) is None


def test_verdict_tokens_and_paths() -> None:
    tree = DraftTree.from_rows([CHAIN, NOTHING, FORK])
    verdict = Verdict(tree, accepted=[[1], [], [5, 7]], bonus=[42, None, 43])
    assert [verdict.tokens(row) for row in range(3)] == [[6, 42], [], [8, 3, 43]]
    assert verdict.paths == [[1], [], [2, 4]]


class TestLikeliest:
    @pytest.mark.parametrize("seed", range(5))
    def test_the_kept_paths_are_the_likeliest(self, seed: int) -> None:
        rng = random.Random(seed)
        parents = [-1, *(rng.randrange(node) for node in range(1, 15))]
        chances = [1.0, *(rng.random() for _ in range(1, 15))]
        reach = [
            math.prod(chances[above] for above in ancestors(parents, node)) for node in range(15)
        ]
        for count in (1, 4, 13):
            kept, new_parents = likeliest(parents, chances, count)
            left_out = [reach[node] for node in range(15) if node not in kept]
            assert len(kept) == count + 1
            assert min(reach[node] for node in kept) > max(left_out)
            assert new_parents[0] == -1
            for index, above in enumerate(new_parents[1:], start=1):
                assert kept[above] == parents[kept[index]]

    def test_nothing_is_lost_without_a_bound_or_within_it(self) -> None:
        for count in (None, 2, 9):
            assert likeliest([-1, 0, 0], [1.0, 0.1, 0.2], count) == ([0, 1, 2], [-1, 0, 0])

    def test_parents_are_kept_before_children_that_are_as_likely(self) -> None:
        assert likeliest([-1, 0, 1, 2], [1.0, 1.0, 1.0, 1.0], 2) == ([0, 1, 2], [-1, 0, 1])
