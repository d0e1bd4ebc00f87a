"""The token graph against a brute-force version of the merge rule, on small random graphs."""

from __future__ import annotations

import random

import pytest

from hf_spec.drafting.token_graph import TokenGraph, position_graph

CONTEXT = [9, 1, 2, 3]


def random_graph(seed: int, merge_length: int | None, steps: int = 40) -> tuple[TokenGraph, list]:
    """Grow a graph over four tokens; return it with the arguments and result of each `add`."""
    rng = random.Random(seed)
    graph = TokenGraph(CONTEXT, merge_length)
    asked = []
    for _ in range(steps):
        parent = rng.randrange(len(graph))
        token = rng.randrange(4)
        if any(graph.tokens[child] == token for child, _ in graph.edges[parent]):
            continue
        probability = rng.uniform(0.05, 0.9)
        asked.append((parent, token, probability, graph.add(parent, token, probability)))
    return graph, asked


def text_before(graph: TokenGraph, node: int) -> list[int]:
    """Return all tokens up to `node`: the context, then the path along parents."""
    return CONTEXT + graph.path(node)


def below(graph: TokenGraph, node: int) -> set[int]:
    found = {node}
    for child, _ in graph.edges[node]:
        found |= below(graph, child)
    return found


@pytest.mark.parametrize("merge_length", [0, 1, 2, 3])
def test_merges_exactly_where_the_rule_says(merge_length: int) -> None:
    for seed in range(10):
        check_merges(seed, merge_length)


def check_merges(seed: int, merge_length: int) -> None:
    reference = TokenGraph(CONTEXT, merge_length)
    _, asked = random_graph(seed, merge_length)
    merges = 0
    for parent, token, probability, got in asked:
        run = [*text_before(reference, parent), token][-merge_length - 1 :]
        twins = [
            node
            for node in range(1, len(reference))
            if text_before(reference, node)[-merge_length - 1 :] == run
            and parent not in below(reference, node)
        ]
        result = reference.add(parent, token, probability)
        assert result == got
        assert (result is None) == bool(twins)
        if twins:
            assert reference.edges[parent][-1] == (twins[0], probability)
            merges += 1
    assert reference.num_merges == merges
    assert merges or merge_length > 1


@pytest.mark.parametrize("merge_length", [0, 1, 2, 3])
def test_the_papers_rule_wherever_it_keeps_the_graph_acyclic(merge_length: int) -> None:
    for seed in range(10):
        check_papers_rule(seed, merge_length)


def check_papers_rule(seed: int, merge_length: int) -> None:
    # In the paper, a node merges into the first equal run outside of its own path.
    reference = TokenGraph(CONTEXT, merge_length)
    _, asked = random_graph(seed, merge_length)
    agreed = 0
    for parent, token, probability, _ in asked:
        run = [*text_before(reference, parent), token][-merge_length - 1 :]
        own_path, node = {0}, parent
        while node:
            own_path.add(node)
            node = reference.parents[node]
        first = next(
            (
                node
                for node in range(1, len(reference))
                if node not in own_path and text_before(reference, node)[-merge_length - 1 :] == run
            ),
            None,
        )
        closes_a_cycle = first is not None and parent in below(reference, first)
        result = reference.add(parent, token, probability)
        if closes_a_cycle:
            continue
        assert (result is None) == (first is not None)
        if first is not None:
            assert reference.edges[parent][-1] == (first, probability)
            agreed += 1
    assert agreed or merge_length > 1


@pytest.mark.parametrize("seed", range(3))
def test_without_a_merge_length_everything_is_drafted(seed: int) -> None:
    graph, asked = random_graph(seed, merge_length=None, steps=80)
    assert graph.num_merges == 0
    assert [node for *_, node in asked] == list(range(1, len(graph)))
    tree = graph.unmerge(max_nodes=200, max_depth=200)
    assert len(tree.tokens) == len(graph)
    assert not any(tree.merged)


def test_probabilities_are_those_of_the_edges() -> None:
    graph, asked = random_graph(4, merge_length=1)
    assert graph.probs == [1.0] + [p for _, _, p, node in asked if node is not None]
    assert graph.spell_out().probs == graph.probs
    tree = graph.unmerge(max_nodes=30, max_depth=6)
    assert any(tree.merged)
    for index in range(1, len(tree.tokens)):
        edges = graph.edges[tree.nodes[tree.parents[index]]]
        assert (tree.nodes[index], tree.probs[index]) in edges


def test_never_has_a_cycle() -> None:
    for seed in range(20):
        check_acyclic(seed)


def check_acyclic(seed: int) -> None:
    graph, _ = random_graph(seed, merge_length=0, steps=120)
    state = dict.fromkeys(range(len(graph)), 0)

    def visit(node: int) -> None:
        assert state[node] != 1, "a path came back to itself"
        if state[node] == 0:
            state[node] = 1
            for child, _ in graph.edges[node]:
                visit(child)
            state[node] = 2

    visit(0)


def all_paths(graph: TokenGraph, max_depth: int) -> dict[tuple[int, ...], float]:
    """Enumerate every path of the graph as tokens -> probability."""
    paths: dict[tuple[int, ...], float] = {}

    def walk(node: int, tokens: tuple[int, ...], reach: float) -> None:
        if len(tokens) == max_depth:
            return
        for child, probability in graph.edges[node]:
            longer = (*tokens, graph.tokens[child])
            paths[longer] = reach * probability
            walk(child, longer, paths[longer])

    walk(0, (), 1.0)
    return paths


@pytest.mark.parametrize("merge_length", [None, 0, 1])
def test_unmerge_spells_out_the_best_paths(merge_length: int | None) -> None:
    for seed in range(10):
        check_best_paths(seed, merge_length)


def check_best_paths(seed: int, merge_length: int | None) -> None:
    graph, _ = random_graph(seed, merge_length)
    paths = all_paths(graph, max_depth=5)
    count = min(12, len(paths))
    tree = graph.unmerge(max_nodes=count, max_depth=5)
    spelled = []
    for index in range(1, len(tree.tokens)):
        tokens: list[int] = []
        node = index
        while node:
            tokens.insert(0, tree.tokens[node])
            node = tree.parents[node]
        spelled.append(tuple(tokens))
    best = sorted(paths.values(), reverse=True)[:count]
    assert len(set(spelled)) == len(spelled) == count
    assert [paths[tokens] for tokens in spelled] == pytest.approx(best)


def test_unmerge_is_deterministic_and_bounded() -> None:
    graph, _ = random_graph(3, merge_length=0, steps=200)
    trees = [graph.unmerge(max_nodes=25, max_depth=4) for _ in range(2)]
    assert trees[0] == trees[1]
    assert len(trees[0].tokens) == 26


def test_a_merged_node_is_marked_and_keeps_the_probability_of_its_own_edge() -> None:
    graph = TokenGraph([7], merge_length=0)
    left = graph.add(0, 1, 0.5)
    right = graph.add(0, 2, 0.4)
    shared = graph.add(left, 3, 0.9)
    assert graph.add(shared, 4, 0.8) == 4
    assert graph.add(right, 3, 0.7) is None
    tree = graph.unmerge(max_nodes=10, max_depth=10)
    merged = [index for index, flag in enumerate(tree.merged) if flag]
    assert [tree.nodes[index] for index in merged] == [shared]
    under = [index for index, above in enumerate(tree.parents) if above in merged]
    assert [tree.tokens[index] for index in under] == [4]
    assert [tree.probs[index] for index in merged] == [0.7]
    assert [tree.probs[index] for index in under] == [0.8]


def test_own_path_is_never_merged_into() -> None:
    graph = TokenGraph([7], merge_length=0)
    first = graph.add(0, 1, 0.5)
    again = graph.add(first, 1, 0.5)
    assert again is not None
    assert graph.depth[again] == 2


def test_history_reaches_into_the_committed_text() -> None:
    graph = TokenGraph([5, 6, 7], merge_length=1)
    first = graph.add(0, 6, 0.5)
    seventh = graph.add(first, 7, 0.5)
    below_seven = graph.add(seventh, 6, 0.5)
    # The run (7, 6) already exists at the root, but on the new node's own path.
    assert below_seven is not None


def test_places_that_were_predicted_at_once() -> None:
    tokens, chances = [[1, 2], [3, 4], [5, 6]], [[0.6, 0.3], [0.5, 0.0], [0.9, 0.1]]
    graph = position_graph(9, tokens, chances, ends=lambda token: token == 2)
    tree = graph.unmerge(max_nodes=20, max_depth=3)
    found = {}
    for index, token in enumerate(tree.tokens[1:], start=1):
        above = found.get(tree.parents[index], ((), 1.0))
        found[index] = (*above[0], token), above[1] * tree.probs[index]
    # Token 2 ends the sequence, so it has no children. Token 4 has probability zero.
    assert dict(found.values()) == pytest.approx(
        {(1,): 0.6, (2,): 0.3, (1, 3): 0.3, (1, 3, 5): 0.27, (1, 3, 6): 0.03}
    )
    every = position_graph(9, tokens, [[0.5, 0.5]] * 3, ends=lambda token: False)
    assert len(every.unmerge(max_nodes=100, max_depth=3).tokens) == 1 + 2 + 4 + 8
