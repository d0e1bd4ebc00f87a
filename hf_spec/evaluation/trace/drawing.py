"""A recorded round as a picture: what was drafted, and what the target made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_spec.evaluation.trace import pictures
from hf_spec.evaluation.trace.pictures import Canvas
from hf_spec.evaluation.trace.rounds import Round


def draw_round(one: Round, decode: Callable[[Sequence[int]], str], row: int = 0) -> Canvas:
    """The draft of an unfinished row: its graph where words were merged in it, else its tree.

    A draft that is a chain is a tree, too. `decode` is a tokenizer's.
    """

    def words(token_ids: Sequence[int]) -> list[str]:
        return [pictures.word(decode([token])) for token in token_ids]

    verdict, tree = one.verdict, one.verdict.tree
    # The target's own token after the accepted ones comes last.
    *_, bonus = words(verdict.tokens(row))
    graph = one.graphs.get(row)
    if graph is not None and graph.num_merges:
        accepted = one.accepted_in_graph(row)
        note = f"{len(accepted)} accepted, then the bonus token: {bonus}"
        return pictures.token_graph(graph, words(graph.tokens), accepted, note)
    # Virtual nodes propose nothing, and nothing that does is below them.
    nodes = [node for node in tree.nodes(row) if tree.tokens[node] >= 0]
    place = {node: index for index, node in enumerate(nodes)}
    parents = [-1, *(place[tree.parent[node]] for node in nodes[1:])]
    accepted = [place[node] for node in verdict.accepted[row]]
    return pictures.token_tree(words([tree.tokens[n] for n in nodes]), parents, accepted, bonus)
