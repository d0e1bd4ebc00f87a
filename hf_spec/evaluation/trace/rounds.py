"""The rounds of a generation, kept to be looked at: what was drafted, what the target made of it.

output, rounds = record_rounds(model, inputs, "falcon", "my-head", max_new_tokens=32)
rounds[3].verdict.tokens(0)  # what the fourth round added to the first row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.generation.hook import original_generate, speculate


@dataclass(frozen=True)
class Round:
    """One draft of every unfinished row, judged by the target.

    For drafters with a draft model `graphs` has per row the graph that the tree was spelled out of.
    """

    verdict: Verdict
    graphs: Mapping[int, TokenGraph]

    def accepted_in_graph(self, row: int) -> list[int]:
        """The accepted nodes of a row, without the root, as nodes of its graph."""
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
    """Generate as `generate()` does, and keep every round.

    `inputs` are `input_ids` and `attention_mask`, and `settings` what else it takes.

    Returns:
        What `generate()` returns, and the rounds in order.
    """
    rounds: list[Round] = []

    def watch(drafter: Drafter) -> None:
        observe = drafter.observe

        def keep(verdict: Verdict, output: ForwardOutput) -> None:
            rounds.append(Round(verdict, dict(getattr(drafter, "graphs", {}))))
            observe(verdict, output)

        drafter.observe = keep  # type: ignore[method-assign]

    given = {**inputs, **settings, "assistant": assistant}
    return speculate(original_generate(), model, spec_strategy, given, watch), rounds
