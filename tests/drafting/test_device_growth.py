"""Drafts grown on the device are identical to drafts grown on the host.

The drafter here reads a table, so many drafts are fast to generate. Draft models on a fake GPU are
tested in `tests/backend/device/test_transfer.py`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import LevelConfig, LevelDrafter
from hf_spec.drafting.pass_plans import PassPlans
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.drafting.tree_growth import Growth, NextTokens, RowGrowth, TreeShape
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree
from tests.drafting.test_rank_tree import random_paths
from tests.methods.draft_model.test_drafter import start
from tests.tiny_models import ragged_batch

SIZE = 11
LENGTHS = (5, 3, 4)
CPU = torch.device("cpu")


class OfTable(LevelDrafter):
    """Drafter whose next-token probabilities depend on the token, its depth and its row."""

    def __init__(self, shape: TreeShape, table: Tensor, propose_on_device: bool):
        class Config(LevelConfig):
            pass

        Config.shape = shape  # type: ignore[assignment, method-assign]
        super().__init__(Config(), LengthPolicy(len(table)))
        self.table = table
        self._unseen = propose_on_device
        self.seen: list[tuple[list[int], list[int], Tensor | None]] = []

    @property
    def supports_device_growth(self) -> bool:
        return self._unseen

    def probabilities(self, state: GenerationState, growth: Growth) -> Tensor:
        if self.supports_device_growth and isinstance(growth, DeviceGrowth):
            self.seen.append((list(growth.rows), growth.pass_parents, growth.visible))
        return self.table[growth.depth, growth.owners, growth.tokens % SIZE]


def table(depth: int, seed: int, zeros: bool) -> Tensor:
    """Return (depth, rows, SIZE, SIZE) float32 with ties and, if `zeros`, zero probabilities."""
    torch.manual_seed(seed)
    logits = (torch.randn(depth, len(LENGTHS), SIZE, SIZE) * 3).round()
    if zeros:
        logits[torch.rand_like(logits) < 0.7] = float("-inf")
        logits[..., 0] = 0.0
    return logits.softmax(dim=-1)


def drafted(
    shape: TreeShape,
    limits: dict[int, int],
    given: Tensor,
    ends: list[int],
    propose_on_device: bool,
) -> tuple[DraftTree, OfTable]:
    state = start(ragged_batch(LENGTHS), eos=ends)
    drafter = OfTable(shape, given, propose_on_device)
    with drafter.active(state):
        return drafter.draft(state, limits), drafter


def random_shape(seed: int) -> TreeShape:
    choose = random.Random(seed)
    if choose.random() < 0.25:
        paths = {(choose.randrange(3),)}
        for _ in range(choose.randrange(12)):
            paths.add((*choose.choice([(), *sorted(paths)]), choose.randrange(4)))
        whole = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        return TreeShape(tree=RankTree.of(sorted(whole)))
    return TreeShape(
        children=choose.choice([1, 1, 2, 3, 20]),
        expanded_per_level=choose.choice([1, 2, 4, 9]),
        max_nodes=choose.choice([3, 15, 1000]),
        min_probability=choose.choice([0.0, 0.0, 0.1, 0.4]),
        min_sibling_ratio=choose.choice([0.0, 0.0, 0.3]),
    )


def test_the_draft_is_the_one_that_grows_level_by_level() -> None:
    for seed in range(60):
        check_growth(seed)


def check_growth(seed: int) -> None:
    choose = random.Random(seed)
    depth = choose.randrange(1, 6)
    limits = {row: choose.randrange(depth + 1) for row in range(len(LENGTHS))}
    ends = choose.choice([[], [2], [1, 3, 4]])
    given = table(depth, seed, choose.random() < 0.5)
    shape = random_shape(seed)
    known, watched = drafted(shape, limits, given, ends, False)
    tree, drafter = drafted(shape, limits, given, ends, True)
    assert bool(drafter.seen) == any(limits.values())
    assert (tree.tokens, tree.parent, tree.node_probs) == (
        known.tokens,
        known.parent,
        known.node_probs,
    )
    for row, graph in watched.graphs.items():
        mine = drafter.graphs[row]
        assert (mine.tokens, mine.parents, mine.edges) == (
            graph.tokens,
            graph.parents,
            graph.edges,
        )
        # The same nodes ran, apart from padding (-1).
        assert [
            node for node in drafter.expanded_nodes[row] if node >= 0
        ] == watched.expanded_nodes[row]
    assert drafter.counters == watched.counters


def paths_told(drafter: OfTable, row: int) -> list[set[int]]:
    """Return, per expanded node of a row, the positions visible to it, including its own."""
    told: list[set[int]] = []
    for rows, parents, sees in drafter.seen:
        if row not in rows:
            break
        if sees is None:
            for index in range(len(told), len(parents)):
                told.append({index} | (told[parents[index]] if index else set()))
            continue
        width = len(sees) // len(rows)
        for line in sees.unflatten(0, (-1, width))[rows.index(row)].tolist():
            bits = "".join(f"{byte:08b}"[::-1] for byte in line)
            told.append({0} | {index + 1 for index, bit in enumerate(bits) if bit == "1"})
    return told


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("expanded", [1, 2, 5])
def test_nodes_see_what_they_descend_from(children: int, expanded: int) -> None:
    shape = TreeShape(children=children, expanded_per_level=expanded)
    _, drafter = drafted(shape, {0: 5, 1: 3, 2: 4}, table(5, 1, False), [], True)
    chosen = 0
    for row, ran in drafter.expanded_nodes.items():
        parents, told = drafter.graphs[row].parents, paths_told(drafter, row)
        assert len(told) == len(ran)
        for index, node in enumerate(ran):
            path, above = set(), node
            while above >= 0:
                path.add(ran.index(above))
                above = parents[above]
            assert told[index] == path
        chosen += any(sees is not None for _, _, sees in drafter.seen)
    # The ancestry of chains and of complete trees is known in advance.
    assert (chosen > 0) == (children**4 > expanded)


def test_depths_are_known_where_parents_are_not() -> None:
    shape = TreeShape(children=3, expanded_per_level=2)
    _, drafter = drafted(shape, {0: 4, 1: 4}, table(4, 2, False), [], True)
    _, parents, _ = drafter.seen[-1]
    tree = DraftTree.from_rows([(list(range(len(parents))), parents)])
    assert tree.depth == [0, 1, 1, 2, 2, 3, 3]


def test_what_a_drawn_chain_comes_from() -> None:
    given = table(4, 3, False)
    state = start(ragged_batch(LENGTHS))
    state.do_sample = True
    drafter = OfTable(TreeShape(), given, True)
    torch.manual_seed(0)
    with drafter.active(state):
        tree = drafter.draft(state, {0: 4, 1: 2, 2: 0})
    assert tree.draft_probs is not None
    for row, count in {0: 4, 1: 2, 2: 0}.items():
        nodes = list(tree.nodes(row))
        assert len(nodes) == count + 1
        for depth, node in enumerate(nodes[:-1]):
            line = given[depth, row, tree.tokens[node] % SIZE]
            assert torch.equal(tree.draft_probs[node], line)


def test_who_asks_or_reads_watches() -> None:
    """Both make the host read every level."""

    class Asking(LengthPolicy):
        def goes_on(self, newest: Any) -> list[bool]:
            return [True] * len(newest)

    state = start(ragged_batch(LENGTHS))
    drafter = OfTable(TreeShape(children=2), table(3, 4, False), True)
    drafter.policy = Asking(3)
    with drafter.active(state):
        drafter.draft(state, {0: 3})
    assert not drafter.seen
    state.do_sample, drafter.policy = True, LengthPolicy(3)
    drafter.start(state)
    drafter.draft(state, {0: 3})
    assert drafter.samples
    assert not drafter.seen


def test_reach_is_as_exact_as_on_the_host() -> None:
    """Products that round to the same float32 number are distinguished."""
    torch.manual_seed(0)
    first, second = torch.rand(2, 10_000) / 4 + 0.25
    # The same two numbers, swapped and nudged in opposite directions.
    other = second.nextafter(torch.tensor(1.0)), first.nextafter(torch.tensor(0.0))
    exact = [(x.double() * y.double()) for x, y in ((first, second), other)]
    tied = (first * second == other[0] * other[1]) & (exact[0] < exact[1])
    case = int(tied.nonzero()[0])
    above = torch.stack([first[case], other[0][case]])[None]
    below = torch.stack([torch.stack([torch.tensor(0.9), second[case]]), torch.zeros(2)])
    below[1, 0] = other[1][case]
    shape = TreeShape(children=2, expanded_per_level=2)
    drafts = {0: RowGrowth(TokenGraph([0]), shape, bool, 3)}
    growing = DeviceGrowth(drafts, PassPlans(shape, [], CPU))
    growing.add(NextTokens(torch.tensor([[[1, 2]]]), above[:, None]))
    growing.advance(growing.next_rows())
    growing.add(NextTokens(torch.tensor([[[3, 4]], [[5, 6]]]), below[:, None]))
    assert growing.next_rows() == [0]
    growing.advance([0])
    assert growing.tokens.tolist() == [3, 5]


Token = tuple[int, ...]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_passes_of_several_levels(size: int, on_device: bool) -> None:
    for seed in range(6):
        check_passes(seed, size, on_device)


def check_passes(seed: int, size: int, on_device: bool) -> None:
    """Check that each node has the token that is predicted from its own path alone.

    The fake head predicts a unique number for each (tokens before the block, level, rank).
    """
    numbers: dict[tuple[Token, int, int], int] = {}
    tree = RankTree.of(random_paths(seed))
    shape = TreeShape(tree=tree, whole=True, levels_per_pass=size)
    limits = {0: tree.height, 2: max(1, tree.height - 2)}
    drafts = {row: RowGrowth(TokenGraph([0]), shape, bool, limit) for row, limit in limits.items()}
    plans = PassPlans(shape, [], CPU)
    growth = DeviceGrowth(drafts, plans) if on_device else Growth(drafts)
    passes = 0
    texts: list[Token] = [()] * len(limits)
    while growth.rows:
        if passes:
            parts = growth.tokens.view(-1, size).tolist()
            above = [texts[parent] for parent in growth.parents.tolist()]
            texts = [(*text, *part) for text, part in zip(above, parts, strict=True)]
        lists = [
            [
                [numbers.setdefault((text, level, rank), len(numbers)) for rank in range(9)]
                for level in range(min(size, tree.height - growth.depth))
            ]
            for text in texts
        ]
        tokens = torch.tensor(lists)
        growth.add(NextTokens(tokens, torch.ones(tokens.shape)))
        growth.advance(growth.next_rows())
        passes += 1
    if isinstance(growth, DeviceGrowth):
        growth.finish()
    assert passes == -(-tree.height // size)
    for row, limit in limits.items():
        graph, cut = drafts[row].graph, tree.cut(limit)
        assert graph.parents == [-1, *(parent + 1 for parent in cut.parents)]
        for node, path in enumerate(cut.paths, start=1):
            text: Token = ()
            block: list[int] = []
            for rank in path:
                if len(block) == size:
                    text, block = (*text, *block), []
                block.append(numbers[text, len(block), rank])
            assert graph.tokens[node] == block[-1]
