"""What a drafted tree is worth when only its likeliest paths are sent to the target.

The head's own probabilities say which of the drafted paths are likely this time, so a larger tree
can be drafted than is sent (compare Li et al. 2024, arXiv 2406.16858, section 4.2). How many nodes
to send is read off real generations that send them all: the place of every accepted node in the
order of likelihood tells what any smaller number would have brought.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_spec.common.outputs import SpecStats
from hf_spec.drafting.rank_tree import Path, RankTree, likeliest_paths
from hf_spec.engine.forward.draft_tree import Verdict, by_likelihood
from hf_spec.evaluation.bench.contenders import speculative
from hf_spec.evaluation.trace import rounds as trace
from hf_spec.methods.falcon.drafter import FalconConfig
from hf_spec.methods.falcon.head import FalconHead
from hf_spec.training.responses import Response


@dataclass(frozen=True)
class Rounds:
    """Rounds that sent the whole of a tree, and the seconds that drafting it took on average.

    `places` has per round and accepted node how many nodes were likelier, ascending.
    """

    tree: RankTree
    places: list[list[int]]
    draft_seconds: float

    def tokens(self, count: int) -> float:
        """Tokens per round, the target's own included, if the `count` likeliest nodes are sent."""
        accepted = sum(place < count for places in self.places for place in places)
        return 1 + accepted / max(len(self.places), 1)


@dataclass(frozen=True)
class Choice:
    """A drafted tree, how many nodes of it are sent, and what that brings after the prompt."""

    tree: RankTree
    max_nodes: int
    tau: float
    tokens_per_second: float

    def summary(self) -> dict[str, float]:
        """The same with the tree's sizes for the tree."""
        return {
            "drafted": len(self.tree),
            "depth": self.tree.height,
            "sent": self.max_nodes,
            "tau": round(self.tau, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def generate_greedily(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, **method: Any
) -> SpecStats:
    """The statistics of a greedy generation, which `method` makes speculate."""
    ids = torch.tensor([prompt])
    stats = speculative(model, ids, new_tokens, torch.ones_like(ids), **method).stats
    assert stats is not None, "our own strategies count"
    return stats


def record_rounds(
    model: PreTrainedModel,
    head: FalconHead,
    tree: RankTree,
    responses: Sequence[Response],
    new_tokens: int,
) -> Rounds:
    """Generate answers to the prompts of `responses`, greedily, sending all of `tree`."""
    config = FalconConfig(tree=tree.paths, length_policy="static")
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    places: list[list[int]] = []
    seconds = 0.0
    for response in responses:
        ids = torch.tensor([response.prompt], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        output, rounds = trace.record_rounds(model, inputs, config, head, **settings)
        seconds += output.spec_stats.draft_seconds
        # The prompt's own forward and the last token's have no draft.
        verdicts = (one.verdict for one in rounds if one.verdict.tree.num_nodes > 1)
        places += map(accepted_places, verdicts)
    return Rounds(tree, places, seconds / max(len(places), 1))


def accepted_places(verdict: Verdict) -> list[int]:
    """Of each accepted node of one row how many nodes were likelier, ascending."""
    assert verdict.tree.node_probs is not None, "the head's drafts carry their probabilities"
    order = by_likelihood(verdict.tree.parent, verdict.tree.node_probs)
    place = {node: index for index, node in enumerate(order[1:])}
    return sorted(place[node] for node in verdict.accepted[0])


def candidates(
    accepted: Mapping[Path, float], block_size: int, depth: int, sizes: Sequence[int]
) -> list[RankTree]:
    """Trees of every number of passes and every size, of the most accepted paths each."""
    found = []
    for num_passes in range(1, -(-depth // block_size) + 1):
        ranked = likeliest_paths(accepted, num_passes * block_size)
        found += [RankTree.of(ranked[:size]) for size in sizes if ranked]
    return list(dict.fromkeys(found))


def best_choice(rounds: Rounds, verify_seconds: Callable[[int], float], max_nodes: int) -> Choice:
    """How much of a tree, up to `max_nodes`, to send for the most tokens per second.

    `verify_seconds` says what a round with so many nodes takes, drafting excluded.
    """
    choices = []
    for count in range(1, min(len(rounds.tree), max_nodes) + 1):
        tokens = rounds.tokens(count)
        rate = tokens / (rounds.draft_seconds + verify_seconds(count))
        choices.append(Choice(rounds.tree, count, tokens - 1, rate))
    return max(choices, key=lambda choice: choice.tokens_per_second)
