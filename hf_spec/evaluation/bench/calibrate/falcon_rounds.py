"""Value of a drafted tree when only its likeliest paths are sent to the target.

The head's probabilities select likely paths in each round, so the drafted tree can be larger than
the sent one (compare Li et al. 2024, arXiv 2406.16858, section 4.2). The number of nodes to send is
chosen from generations that send all: the likelihood ranks of the accepted nodes give the accepted
tokens for every smaller number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_spec.drafting.rank_tree import Path, RankTree, likeliest_paths
from hf_spec.engine.forward.draft_tree import Verdict, by_likelihood
from hf_spec.evaluation.trace import rounds as trace
from hf_spec.methods.falcon.drafter import FalconConfig
from hf_spec.methods.falcon.head import FalconHead
from hf_spec.training.responses import Response


@dataclass(frozen=True)
class Rounds:
    """Rounds that sent a whole tree, whose drafting took `draft_seconds` on average.

    `ranks` has per round the likelihood rank of each accepted node, ascending.
    """

    tree: RankTree
    ranks: list[list[int]]
    draft_seconds: float

    def tokens(self, count: int) -> float:
        """Return tokens per round, bonus included, if the `count` likeliest nodes are sent."""
        accepted = sum(rank < count for ranks in self.ranks for rank in ranks)
        return 1 + accepted / max(len(self.ranks), 1)


@dataclass(frozen=True)
class Choice:
    """Drafted tree with its number of sent nodes, and the speed reached with it."""

    tree: RankTree
    max_nodes: int
    tau: float
    tokens_per_second: float

    def summary(self) -> dict[str, float]:
        """Return JSON values, with the sizes of the tree instead of its paths."""
        return {
            "drafted": len(self.tree),
            "depth": self.tree.height,
            "sent": self.max_nodes,
            "tau": round(self.tau, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def record_rounds(
    model: PreTrainedModel,
    head: FalconHead,
    tree: RankTree,
    responses: Sequence[Response],
    new_tokens: int,
) -> Rounds:
    """Generate greedily from the prompts of `responses`, sending the whole `tree`."""
    config = FalconConfig(tree=tree.paths, length_policy="static")
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    ranks: list[list[int]] = []
    seconds = 0.0
    for response in responses:
        ids = torch.tensor([response.prompt], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        output, rounds = trace.record_rounds(model, inputs, config, head, **settings)
        seconds += output.spec_stats.draft_seconds
        # The prefill and the round of the last token have no draft.
        verdicts = (r.verdict for r in rounds if r.verdict.tree.num_nodes > 1)
        ranks += map(accepted_ranks, verdicts)
    return Rounds(tree, ranks, seconds / max(len(ranks), 1))


def accepted_ranks(verdict: Verdict) -> list[int]:
    """Return for each accepted node of row 0 the number of likelier nodes, ascending."""
    assert verdict.tree.node_probs is not None, "drafts of a head have probabilities"
    order = by_likelihood(verdict.tree.parent, verdict.tree.node_probs)
    rank = {node: index for index, node in enumerate(order[1:])}
    return sorted(rank[node] for node in verdict.accepted[0])


def candidates(
    accepted: Mapping[Path, float], block_size: int, depth: int, sizes: Sequence[int]
) -> list[RankTree]:
    """Return trees of the most accepted paths, for every number of passes and every size."""
    trees = []
    for num_passes in range(1, -(-depth // block_size) + 1):
        ranked = likeliest_paths(accepted, num_passes * block_size)
        trees += [RankTree.of(ranked[:size]) for size in sizes if ranked]
    return list(dict.fromkeys(trees))


def best_choice(rounds: Rounds, verify_seconds: Callable[[int], float], max_nodes: int) -> Choice:
    """Return the number of nodes to send, up to `max_nodes`, with the most tokens per second.

    `verify_seconds` returns the seconds of a round with N nodes, without drafting.
    """
    choices = []
    for count in range(1, min(len(rounds.tree), max_nodes) + 1):
        tokens = rounds.tokens(count)
        rate = tokens / (rounds.draft_seconds + verify_seconds(count))
        choices.append(Choice(rounds.tree, count, tokens - 1, rate))
    return max(choices, key=lambda choice: choice.tokens_per_second)
