"""Calibration of a Falcon head's tree by acceptance and time (`hf-spec calibrate`).

1. Acceptance: on held-out answers, record the rank of every true token in the draft list of its
   depth. This gives the exact share of drafts in which a path is accepted. Drafts start at every
   position, in a generation only where the last round ended, so tau may differ slightly.
2. Time: generations with trees of several sizes and depths measure the cost of a round.
3. `best_tree` maximizes accepted tokens per second (Gao et al. 2024, arXiv 2412.12639, section 3.3
   choose trees by acceptance only).
4. Larger trees are compared with it, of which only the likeliest paths are sent in each round
   (compare Li et al. 2024, arXiv 2406.16858, section 4.2). The number of nodes to send is chosen
   from generations that send all: the likelihood ranks of the accepted nodes give the accepted
   tokens for every smaller number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.common.errors import OptionError
from hf_spec.common.machine import environment
from hf_spec.common.prompts import load_prompts
from hf_spec.drafting.cost_model.cost_curves import interpolate
from hf_spec.drafting.rank_tree import Path as TreePath
from hf_spec.drafting.rank_tree import RankTree, best_tree, likeliest_paths
from hf_spec.engine.forward.draft_tree import by_likelihood
from hf_spec.evaluation.bench.contenders import speculative
from hf_spec.evaluation.settings import TreeSettings
from hf_spec.evaluation.trace import rounds as trace
from hf_spec.methods.falcon.drafter import FalconConfig, max_depth
from hf_spec.methods.falcon.head import METHOD, FalconHead
from hf_spec.methods.falcon.rank_stats import ranks_along
from hf_spec.training.features import text_features
from hf_spec.training.responses import Response

# Prompt tokens of a timed run; few, so that the prefill is negligible.
PROMPT_TOKENS = 24


def calibrate_falcon(
    model: PreTrainedModel,
    folder: Path,
    responses: Sequence[Response],
    settings: TreeSettings,
    progress: Callable[[], None] = lambda: None,
) -> SpecAdapter:
    """Write the fastest tree on this machine into the adapter in `folder`, and return it.

    `responses` are answers of the target that are not in the training set of the head. `progress`
    is called after every answer, every timed run and every tree. The options of the adapter get
    "tree", "max_nodes" (the number of nodes sent), and "calibration" (the measurements). Raises
    `OptionError` if no answer is long enough, one belongs to a benchmark prompt, or no draft is
    accepted, and `AssistantError` if the adapter cannot be used.
    """
    check_answers(responses)
    adapter = load_adapter(folder, METHOD)
    head = FalconHead.from_adapter(adapter, model)
    settings = replace(settings, depth=min(settings.depth, max_depth(head) or settings.depth))
    ranks = true_ranks(head, model, responses, settings, progress)
    accepted = accepted_paths(ranks, settings.num_ranks)
    if not accepted:
        raise OptionError("the target accepts no token drafted by the head; train it longer")
    longest = max(responses, key=lambda response: len(response.response))
    seconds = time_rounds(head, model, longest.prompt, settings, progress)
    size = head.shape.block_size
    static = best_tree(accepted, seconds.cost, size, settings.max_nodes)
    choices = []
    trees = [static, *candidates(accepted, size, settings.depth, settings.drafted_nodes)]
    for tree in dict.fromkeys(trees):
        prompts = responses[: settings.generations]
        rounds = record_rounds(model, head, tree, prompts, settings.new_tokens)
        choices.append(best_choice(rounds, seconds.verifying, settings.max_nodes))
        progress()
    choice = max(choices, key=lambda choice: choice.tokens_per_second)
    options = {
        **adapter.options,
        "tree": [list(path) for path in choice.tree.paths],
        "max_nodes": choice.max_nodes,
        "calibration": {
            **asdict(settings),
            "environment": environment(model.device),
            "rounds": len(ranks),
            "accepted_by_depth_and_rank": shares_by_rank(ranks, settings.num_ranks),
            "seconds": asdict(seconds),
            "static": {
                "tree": [list(path) for path in static.paths],
                "tau": sum(accepted[path] for path in static.paths),
            },
            "choices": [choice.summary() for choice in choices],
            "best": choices.index(choice),
        },
    }
    calibrated = replace(adapter, options=options)
    save_with_card(folder, calibrated)
    return calibrated


def check_answers(responses: Sequence[Response]) -> None:
    """Raise `OptionError` for answers to benchmark prompts: tuned results would be invalid."""
    reported = {prompt.id for prompt in load_prompts()}
    for response in responses:
        if response.id in reported:
            raise OptionError(
                f"answer {response.id!r} belongs to a benchmark prompt; calibrate on other prompts"
            )


def true_ranks(
    head: FalconHead,
    model: PreTrainedModel,
    responses: Sequence[Response],
    settings: TreeSettings,
    progress: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return (drafts, depth) ranks of the true tokens, for drafts from every position of an answer.

    The first draft starts after the first token of an answer, which the prefill yields, and the
    last one full depth before the end. Raises `OptionError` if no answer is longer than a draft.
    """
    ranks = []
    for response in responses:
        tokens = [*response.prompt, *response.response]
        first = max(len(response.prompt), head.shape.block_size)
        starts = range(first, len(tokens) - settings.depth)
        if starts:
            states = text_features(model, [response], head.hidden_layers)[0]
            features = head.fuse(states.split(head.hidden_size, dim=-1))
            ranks.append(ranks_along(head, tokens, features, starts, settings.depth))
        progress()
    if not ranks:
        raise OptionError(f"no answer is longer than {settings.depth} tokens; use longer answers")
    return torch.cat(ranks)


def accepted_paths(ranks: torch.Tensor, num_ranks: int) -> dict[TreePath, float]:
    """Return path -> share of drafts whose true tokens have these ranks."""
    counts: Counter[TreePath] = Counter()
    for row in ranks.tolist():
        length = next((i for i, rank in enumerate(row) if not 0 <= rank < num_ranks), len(row))
        counts.update(tuple(row[:depth]) for depth in range(1, length + 1))
    return {path: count / len(ranks) for path, count in counts.items()}


def shares_by_rank(ranks: torch.Tensor, num_ranks: int) -> list[list[float]]:
    """Return by depth and rank the share of drafts, among those listed at all depths above."""
    inside = (ranks >= 0) & (ranks < num_ranks)
    shares = []
    alive = torch.ones(len(ranks), dtype=torch.bool)
    for depth in range(ranks.shape[1]):
        column = ranks[alive, depth]
        counts = [int((column == rank).sum()) for rank in range(num_ranks)]
        shares.append([round(count / max(len(column), 1), 4) for count in counts])
        alive = alive & inside[:, depth]
    return shares


@dataclass(frozen=True)
class RoundSeconds:
    """Cost of a round: seconds without drafting by nodes, seconds of drafting by passes."""

    verify: dict[int, float]
    draft: dict[int, float]

    def cost(self, nodes: int, passes: int) -> float:
        """Return the seconds of a round, by linear interpolation and extrapolation."""
        return self.verifying(nodes) + _interpolate(self.draft, passes)

    def verifying(self, nodes: int) -> float:
        """Return the seconds of a round without drafting."""
        return _interpolate(self.verify, nodes)


def time_rounds(
    head: FalconHead,
    model: PreTrainedModel,
    prompt: Sequence[int],
    settings: TreeSettings,
    progress: Callable[[], None] = lambda: None,
) -> RoundSeconds:
    """Time generations with trees of every size and chains of every number of passes."""
    size = head.shape.block_size
    # No tree is larger than `max_nodes`, and no list longer than the head's vocabulary.
    largest = min(settings.max_nodes, head.head.size)
    counts = sorted({largest, *(count for count in settings.node_counts if count < largest)})
    bushes = {count: bush(count, min(size, settings.depth)) for count in counts}
    most = -(-settings.depth // size)
    chains = {n: RankTree.chain(min(n * size, settings.depth)) for n in range(1, most + 1)}
    ids = torch.tensor([prompt[-PROMPT_TOKENS:]])
    verify: dict[int, list[float]] = {count: [] for count in bushes}
    draft: dict[int, list[float]] = {count: [] for count in chains}
    for repeat in range(settings.repeats + 1):
        for table, trees in ((verify, bushes), (draft, chains)):
            for key, tree in trees.items():
                config, mask = FalconConfig(tree=tree.paths), torch.ones_like(ids)
                method: dict[str, Any] = {"spec_strategy": config, "assistant": head}
                stats = speculative(model, ids, settings.new_tokens, mask, **method).stats
                assert stats is not None, "our strategies return statistics"
                if table is verify:
                    seconds = (stats.verify_seconds + stats.other_seconds) / stats.target_forwards
                else:  # The prefill has no draft.
                    seconds = stats.draft_seconds / max(stats.target_forwards - 1, 1)
                if repeat:  # The first repetition packs weights and warms caches.
                    table[key].append(seconds)
                    progress()
    return RoundSeconds(
        {key: median(values) for key, values in verify.items()},
        {key: median(values) for key, values in draft.items()},
    )


def bush(num_nodes: int, depth: int) -> RankTree:
    """Return a tree of one pass: a chain of at most `depth` nodes and siblings of its first."""
    chain = RankTree.chain(min(depth, num_nodes)).paths
    return RankTree.of([*chain, *((rank,) for rank in range(1, num_nodes - len(chain) + 1))])


def _interpolate(table: dict[int, float], at: int) -> float:
    sizes, seconds = zip(*sorted(table.items()), strict=True)
    return seconds[0] if len(sizes) == 1 else interpolate(sizes, seconds, at)


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
        for verdict in (recorded.verdict for recorded in rounds):
            # The prefill and the round of the last token have no draft.
            if verdict.tree.num_nodes > 1:
                assert verdict.tree.node_probs is not None, "drafts of a head have probabilities"
                _, *likeliest = by_likelihood(verdict.tree.parent, verdict.tree.node_probs)
                ranks.append(sorted(map(likeliest.index, verdict.accepted[0])))
    return Rounds(tree, ranks, seconds / max(len(ranks), 1))


def candidates(
    accepted: Mapping[TreePath, float], block_size: int, depth: int, sizes: Sequence[int]
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
