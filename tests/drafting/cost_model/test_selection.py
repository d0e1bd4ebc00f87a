"""Selection: chosen nodes are optimal, drafters follow costs and acceptance rates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_spec.drafting.cost_model.cost_curves import Costs, Curve
from hf_spec.drafting.cost_model.draft_source import NODES_PER_LEVEL, MergedTree
from hf_spec.drafting.cost_model.selection import (
    MISSED_SHARE,
    SAVING_FACTOR,
    Horizon,
    NodeLimits,
    PlannedRound,
    choose_nodes,
    choose_sources,
)


def costs(per_node: float = 0.05, **draft: float) -> Costs:
    """Return costs: 1 s for one node in a forward pass, `draft` seconds per draft level."""
    curves = {name: Curve([(0, 0.0), (1, seconds)]) for name, seconds in draft.items()}
    return Costs(Curve([(1, 1.0), (2, 1.0 + per_node)]), curves)


def tree(*nodes: tuple[int, float]) -> MergedTree:
    """Return a tree built from the (parent, value) of each node."""
    merged = MergedTree(5)
    for token, (parent, value) in enumerate(nodes, start=10):
        merged.add_node(parent, token)
        merged.best_reach.append(value)
    return merged


class Level:
    """Draft source with fixed level rates."""

    chain: tuple[float, ...] = ()

    def __init__(self, name: str, *levels: float, exclusive_tree: bool = False, nodes: int = 0):
        self.name, self.levels, self.depth = name, levels, len(levels)
        self.drafter = SimpleNamespace(exclusive_tree=exclusive_tree)
        self.sizes = dict.fromkeys(range(9), nodes) if nodes else {}
        self.nodes_per_level = NODES_PER_LEVEL

    def level_rate(self, row: int, depth: int) -> float:
        return self.levels[depth - 1]

    def chain_rate(self, row: int, depth: int) -> float:
        return self.chain[depth - 1] if self.chain else 0.0


def ask(trees: dict[int, MergedTree], known: Costs, *sources: Any, room: int = 9) -> PlannedRound:
    base, _ = choose_nodes(known, trees, NodeLimits(40))
    return choose_sources(base, trees, sources, dict.fromkeys(trees, room), Horizon())


def test_a_branch_costs_what_is_above_it_again() -> None:
    """Recurrent layers run every path from the root separately."""
    branched = tree((0, 0.9), (1, 0.8), (2, 0.7), (2, 0.3))
    attending, recurrent = costs(0.05), replace(costs(0.05), branch=1.0)
    best, chosen = choose_nodes(attending, {0: branched}, NodeLimits(40))
    assert (chosen[0], best.nodes) == ([1, 2, 3, 4], 5)
    best, chosen = choose_nodes(recurrent, {0: branched}, NodeLimits(40))
    assert (chosen[0], best.nodes) == ([1, 2, 3], 4)
    best, _ = choose_nodes(replace(costs(0.0), branch=0.5), {0: branched}, NodeLimits(40))
    assert best.nodes == 5 + 0.5 * 3


class TestNodes:
    def test_no_other_tree_is_faster(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for _ in range(20):
            parents = [int(torch.randint(0, i, (), generator=generator)) for i in range(1, 8)]
            nodes: list[tuple[int, float]] = []
            for parent in parents:
                above = 1.0 if not parent else nodes[parent - 1][1]
                nodes.append((parent, above * float(torch.rand((), generator=generator))))
            best, chosen = choose_nodes(costs(0.15), {0: tree(*nodes)}, NodeLimits(40))
            rates = []
            for count in range(8):
                for some in itertools.combinations(range(1, 8), count):
                    if all(nodes[n - 1][0] in {0, *some} for n in some):
                        worth = 1 + sum(nodes[n - 1][1] for n in some)
                        rates.append(worth / (1 + 0.15 * count))
            assert best.rate == pytest.approx(max(rates))
            assert all(nodes[n - 1][0] in {0, *chosen[0]} for n in chosen[0])

    def test_nothing_where_nothing_pays(self) -> None:
        proposed = {0: tree((0, 0.3), (1, 0.2)), 1: tree((0, 0.1))}
        best, chosen = choose_nodes(costs(0.5), proposed, NodeLimits(40))
        assert chosen == {0: [], 1: []}
        assert (best.tokens, best.nodes) == (2, 2)

    def test_a_draft_must_promise_more_than_a_little(self) -> None:
        for reach, sent in ((0.09, []), (0.11, [1])):
            _, chosen = choose_nodes(costs(0.05), {0: tree((0, reach))}, NodeLimits(40))
            assert chosen[0] == sent

    def test_rows_share_a_forward_but_not_a_choice(self) -> None:
        proposed = {0: tree((0, 0.9), (1, 0.8)), 3: tree((0, 0.04), (0, 0.6))}
        _, chosen = choose_nodes(costs(0.1), proposed, NodeLimits(40))
        assert chosen == {0: [1, 2], 3: [2]}

    def test_most_nodes_of_a_row(self) -> None:
        proposed = {0: tree(*((0, 0.5 - i / 100) for i in range(9))), 1: tree((0, 0.2))}
        best, chosen = choose_nodes(costs(0.0), proposed, NodeLimits(3))
        assert chosen == {0: [1, 2, 3], 1: [1]}
        assert best.nodes == 6

    def test_most_nodes_of_all_rows(self) -> None:
        proposed = {0: tree((0, 0.5), (1, 0.4)), 1: tree((0, 0.9))}
        for most, expected in ((9, [1, 2]), (4, [1]), (3.5, []), (1, [])):
            best, chosen = choose_nodes(costs(0.0), proposed, NodeLimits(3, most))
            assert chosen[0] == expected
            assert best.nodes == 2 + len(chosen[0]) + len(chosen[1]) <= max(most, 2)

    def test_drafting_that_took_time_raises_what_is_sent(self) -> None:
        proposed = {0: tree((0, 0.4), (0, 0.12), (0, 0.06))}
        sent = [
            len(choose_nodes(costs(0.1), proposed, NodeLimits(40), spent)[1][0])
            for spent in (0.0, 5.0)
        ]
        assert sent == [1, 3]

    def test_what_a_draft_takes_on_the_host_is_saved_without_one(self) -> None:
        proposed = {0: tree((0, 0.4), (1, 0.3))}
        for host, expected in ((0.0, [1, 2]), (0.3, [1, 2]), (0.7, [])):
            _, chosen = choose_nodes(costs(0.1), proposed, NodeLimits(40), host_seconds=host)
            assert chosen[0] == expected


class TestHorizon:
    def test_a_drafter_that_must_read_first_runs_if_the_rest_saves_that_time(self) -> None:
        known, trees = costs(0.01, good=0.2), {0: tree()}
        base, _ = choose_nodes(known, trees, NodeLimits(40))
        source: Any = Level("good", 0.9, 0.9, 0.9)
        best = choose_sources(base, trees, [source], {0: 9}, Horizon())
        saved = 50 * (1 / base.rate - 1 / best.rate) / SAVING_FACTOR
        for reading, chosen in ((0.99 * saved, {"good": {0: 3}}), (1.01 * saved, {})):
            horizon = Horizon(50, {"good": reading})
            assert choose_sources(base, trees, [source], {0: 9}, horizon).depths == chosen

    def test_beside_copied_text_it_first_misses_a_share_of_that_time(self) -> None:
        known, trees = costs(0.01, good=0.2), {0: tree()}
        base, _ = choose_nodes(known, trees, NodeLimits(40))
        source: Any = Level("good", 0.9, 0.9, 0.9)
        best = choose_sources(base, trees, [source], {0: 9}, Horizon())
        missed_per_round = base.tokens * (1 / base.rate - 1 / best.rate)
        missed: dict[str, float] = {}
        horizon = Horizon(1000, {"good": 3.5 * missed_per_round / MISSED_SHARE}, missed)
        rounds = [
            bool(choose_sources(base, trees, [source], {0: 9}, horizon).depths) for _ in range(5)
        ]
        assert rounds == [False, False, False, True, True]
        # Where everything is copied, nothing is missed.
        missed.clear()
        sure = {0: tree((0, 0.99), (1, 0.98), (2, 0.97))}
        copied, _ = choose_nodes(known, sure, NodeLimits(40))
        for _ in range(50):
            assert not choose_sources(copied, sure, [source], {0: 9}, horizon).depths
        assert not missed


class TestSources:
    def test_asked_where_it_pays_and_as_deep_as_it_pays(self) -> None:
        good = Level("good", 0.9, 0.9, 0.9, 0.1, 0.1)
        chosen = ask({0: tree()}, costs(0.02, good=0.1), good)
        assert chosen.depths == {"good": {0: 3}}
        assert chosen.draft_seconds == pytest.approx(0.3)
        assert ask({0: tree()}, costs(0.02, good=1.0), good).depths == {}
        assert ask({0: tree()}, costs(0.3, good=0.1), good).depths == {}
        assert ask({0: tree()}, costs(0.02, good=0.1), good, room=1).depths == {"good": {0: 1}}
        assert ask({0: tree()}, costs(0.02, good=0.1), good, room=0).depths == {}

    def test_not_for_what_is_proposed_already(self) -> None:
        good = Level("good", 0.8, 0.8)
        sure = tree((0, 0.97), (1, 0.95), (2, 0.9))
        known = costs(0.02, good=0.2)
        assert ask({0: tree()}, known, good).depths
        assert ask({0: sure}, known, good).depths == {}

    def test_the_better_of_two_and_both_if_they_help_different_rows(self) -> None:
        one, two = Level("one", 0.9, 0.8), Level("two", 0.7, 0.5)
        known = costs(0.01, one=0.15, two=0.15)
        assert set(ask({0: tree()}, known, two, one).depths) == {"one"}

        class ForRow(Level):
            def level_rate(self, row: int, depth: int) -> float:
                return 0.95 if str(row) == self.name else 0.0

        rows = {0: tree(), 1: tree()}
        asked = ask(
            rows, costs(0.01, **{"0": 0.1, "1": 0.1}), ForRow("0", 1), ForRow("1", 1)
        ).depths
        assert asked == {"0": {0: 1, 1: 0}, "1": {0: 0, 1: 1}}

    def test_a_chain_where_a_tree_does_not_pay(self) -> None:
        """At 0.3 per node, a level must gain 1.2 with four nodes, and 0.3 with one."""
        good = Level("good", 0.9, 0.9)
        good.chain = (0.8, 0.2)
        assert ask({0: tree()}, costs(0.3, good=0.1), good).depths == {"good": {0: 1}}
        cheap = ask({0: tree()}, costs(0.02, good=0.1), good)
        assert (cheap.depths, cheap.nodes) == ({"good": {0: 2}}, 1 + 2 * NODES_PER_LEVEL)
        assert cheap.tokens == pytest.approx(1 + 0.9 + 0.81)
        assert ask({0: tree()}, costs(0.9, good=0.1), good).depths == {}

    def test_a_tree_that_stays_whole_takes_the_place_of_all_others(self) -> None:
        own = Level("own", 0.9, 0.9, exclusive_tree=True, nodes=6)
        assert ask({0: tree((0, 0.5))}, costs(0.02), own).depths == {"own": {0: 2}}
        assert ask({0: tree((0, 0.9), (1, 0.9))}, costs(0.1), own).depths == {}


def test_rows_share_the_pass_of_a_level_and_verify_a_node_each() -> None:
    known = costs(per_node=0.1, chain=0.5)
    chosen = PlannedRound(known, tokens=3.0, nodes=1)
    assert chosen.rate == pytest.approx(3.0)
    cost = chosen.level_cost(Level("chain", 0.9), 2, 4, 1)  # type: ignore[arg-type]
    assert cost == pytest.approx((3.0 * 0.5, 3.0 * 0.1))
