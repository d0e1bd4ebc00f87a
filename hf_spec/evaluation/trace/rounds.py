"""Recording and drawing of the rounds of a generation.

output, rounds = record_rounds(model, inputs, "falcon", "my-head", max_new_tokens=32)
rounds[3].verdict.tokens(0)  # tokens that the fourth round added to the first row
draw_round(rounds[3], tokenizer.decode)  # its draft, in a notebook
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.evaluation.trace.pictures import Canvas, token_graph, token_tree, word
from hf_spec.generation.hook import original_generate, speculate


@dataclass(frozen=True)
class Round:
    """One verified draft of every unfinished row.

    `graphs` has for drafters with a draft model the graph of each row that the tree was made from.
    """

    verdict: Verdict
    graphs: Mapping[int, TokenGraph]

    def accepted_in_graph(self, row: int) -> list[int]:
        """Return the accepted nodes of a row as nodes of its graph, without the root."""
        graph, path = self.graphs[row], [0]
        for node in self.verdict.accepted[row]:
            token = self.verdict.tree.tokens[node]
            path.append(next(c for c, _ in graph.edges[path[-1]] if graph.tokens[c] == token))
        return path[1:]


def record_rounds(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    spec_strategy: str | StrategyConfig,
    assistant: Any = None,
    **settings: Any,
) -> tuple[Any, list[Round]]:
    """Return the output of `generate()`, and the recorded rounds in order.

    `inputs` are `input_ids` and `attention_mask`; `settings` are further arguments of `generate()`.
    """
    rounds: list[Round] = []

    def record_from(drafter: Drafter) -> None:
        observe = drafter.observe

        def record(verdict: Verdict, output: ForwardOutput) -> None:
            rounds.append(Round(verdict, dict(getattr(drafter, "graphs", {}))))
            observe(verdict, output)

        drafter.observe = record  # type: ignore[method-assign]

    arguments = {**inputs, **settings, "assistant": assistant}
    return speculate(original_generate(), model, spec_strategy, arguments, record_from), rounds


def draw_round(recorded: Round, decode: Callable[[Sequence[int]], str], row: int = 0) -> Canvas:
    """Draw the verified draft of an unfinished row.

    The picture shows the graph of the row if it has merged tokens, otherwise the tree (or chain).
    `decode` is that of a tokenizer.
    """

    def words(token_ids: Sequence[int]) -> list[str]:
        return [word(decode([token])) for token in token_ids]

    verdict, tree = recorded.verdict, recorded.verdict.tree
    # The bonus token comes last.
    *_, bonus = words(verdict.tokens(row))
    graph = recorded.graphs.get(row)
    if graph is not None and graph.num_merges:
        accepted = recorded.accepted_in_graph(row)
        note = f"{len(accepted)} accepted, then the bonus token: {bonus}"
        return token_graph(graph, words(graph.tokens), accepted, note)
    # Virtual nodes draft nothing and have no drafting nodes below them.
    nodes = [node for node in tree.nodes(row) if tree.tokens[node] >= 0]
    index = {node: i for i, node in enumerate(nodes)}
    parents = [-1, *(index[tree.parent[node]] for node in nodes[1:])]
    accepted = [index[node] for node in verdict.accepted[row]]
    return token_tree(words([tree.tokens[n] for n in nodes]), parents, accepted, bonus)
