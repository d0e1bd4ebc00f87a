"""The tree of a Falcon head, from measured acceptance and measured time (`hf-spec calibrate`).

Acceptance: on answers that the head has not learned from, the rank of every true token in the list
that drafting would have made, depth by depth; so the share of drafts in which any path is accepted
is known exactly. Drafts from every place count alike, while a generation drafts where its last
round ended, so its own tau may differ a little. Time: generations with trees of different size and
depth say what a round costs on this machine. `best_tree` weighs one against the other (compare Gao
et al. 2024, arXiv 2412.12639, section 3.3, whose trees were found by acceptance alone). Larger
trees, of which only the likeliest paths are sent, then compete with it (see `falcon_rounds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.common.errors import OptionError
from hf_spec.common.machine import environment
from hf_spec.common.prompts import load_prompts
from hf_spec.drafting import rank_tree
from hf_spec.drafting.cost_model.cost_curves import straight
from hf_spec.drafting.rank_tree import RankTree, best_tree
from hf_spec.evaluation.bench.calibrate.falcon_rounds import (
    best_choice,
    candidates,
    generate_greedily,
    record_rounds,
)
from hf_spec.evaluation.bench.settings import TreeSettings
from hf_spec.methods.falcon.drafter import FalconConfig
from hf_spec.methods.falcon.head import METHOD, FalconHead
from hf_spec.methods.falcon.rank_stats import ranks_along
from hf_spec.methods.falcon.tree_choice import max_depth
from hf_spec.training.features import text_features
from hf_spec.training.responses import Response

# Tokens of the prompt in a timed run: so few that the first forward hardly counts.
PROMPT_TOKENS = 24


def calibrate_falcon(
    model: PreTrainedModel,
    folder: Path,
    responses: Sequence[Response],
    settings: TreeSettings,
    progress: Callable[[], None] = lambda: None,
) -> SpecAdapter:
    """Write the fastest tree for this machine into the adapter in `folder`.

    `responses` are answers of the target that the head has not learned from; `progress` is called
    after every answer, every timed run and every tree.

    Returns:
        The adapter as written; `options["tree"]` has the tree, `options["max_nodes"]` how much of
        it is sent, `options["calibration"]` why.

    Raises:
        OptionError: if no answer is long enough, some answer prompts of the benchmarks, or nothing
            is ever accepted.
        AssistantError: if the adapter cannot be used.
    """
    check_answers(responses)
    adapter = load_adapter(folder, METHOD)
    head = FalconHead.from_adapter(adapter, model)
    settings = replace(settings, depth=min(settings.depth, max_depth(head) or settings.depth))
    ranks = true_ranks(head, model, responses, settings, progress)
    accepted = accepted_paths(ranks, settings.num_ranks)
    if not accepted:
        raise OptionError("the head never drafts a token that the target accepts; train it longer")
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
    choice = max(choices, key=lambda one: one.tokens_per_second)
    options = {
        **adapter.options,
        "tree": [list(path) for path in choice.tree.paths],
        "max_nodes": choice.max_nodes,
        "calibration": {
            **asdict(settings),
            "environment": environment(),
            "rounds": len(ranks),
            "accepted_by_depth_and_rank": shares_by_rank(ranks, settings.num_ranks),
            "seconds": asdict(seconds),
            "static": {
                "tree": [list(path) for path in static.paths],
                "tau": sum(accepted[path] for path in static.paths),
            },
            "choices": [one.summary() for one in choices],
            "best": choices.index(choice),
        },
    }
    calibrated = replace(adapter, options=options)
    save_with_card(folder, calibrated)
    return calibrated


def check_answers(responses: Sequence[Response]) -> None:
    """Refuse answers to prompts that benchmarks report on; a tree tuned on them proves nothing."""
    reported = {prompt.id for prompt in load_prompts()}
    for response in responses:
        if response.id in reported:
            raise OptionError(
                f"answer {response.id!r} is to one of the benchmark's own prompts; calibrate on "
                "others"
            )


def true_ranks(
    head: FalconHead,
    model: PreTrainedModel,
    responses: Sequence[Response],
    settings: TreeSettings,
    progress: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """(drafts, depth) ranks of the true tokens, from every place of every answer.

    The first token of an answer comes with the prompt's own forward, and after it begins the first
    draft; the last draft has its whole depth still before it.

    Raises:
        OptionError: if no answer is longer than a draft.
    """
    found = []
    for response in responses:
        tokens = [*response.prompt, *response.response]
        first = max(len(response.prompt), head.shape.block_size)
        starts = range(first, len(tokens) - settings.depth)
        if starts:
            states = text_features(model, [response], head.hidden_layers)[0]
            features = head.fuse(states.split(head.hidden_size, dim=-1))
            found.append(ranks_along(head, tokens, features, starts, settings.depth))
        progress()
    if not found:
        raise OptionError(f"no answer is longer than {settings.depth} tokens; give longer ones")
    return torch.cat(found)


def accepted_paths(ranks: torch.Tensor, num_ranks: int) -> dict[rank_tree.Path, float]:
    """Path -> the share of drafts whose true tokens have these ranks."""
    counts: Counter[rank_tree.Path] = Counter()
    for row in ranks.tolist():
        known = next((i for i, rank in enumerate(row) if not 0 <= rank < num_ranks), len(row))
        counts.update(tuple(row[:depth]) for depth in range(1, known + 1))
    return {path: count / len(ranks) for path, count in counts.items()}


def shares_by_rank(ranks: torch.Tensor, num_ranks: int) -> list[list[float]]:
    """Per depth and rank the share among drafts whose tokens above stood in the lists, if any."""
    inside = (ranks >= 0) & (ranks < num_ranks)
    shares = []
    alive = torch.ones(len(ranks), dtype=torch.bool)
    for depth in range(ranks.shape[1]):
        mine = ranks[alive, depth]
        counts = [int((mine == rank).sum()) for rank in range(num_ranks)]
        shares.append([round(count / max(len(mine), 1), 4) for count in counts])
        alive = alive & inside[:, depth]
    return shares


@dataclass(frozen=True)
class RoundSeconds:
    """What a round takes: seconds of all but drafting by nodes, and of drafting by passes."""

    verify: dict[int, float]
    draft: dict[int, float]

    def cost(self, nodes: int, passes: int) -> float:
        """Seconds of a round, straight lines between what was measured and beyond it."""
        return self.verifying(nodes) + _between(self.draft, passes)

    def verifying(self, nodes: int) -> float:
        """Seconds of a round but for drafting."""
        return _between(self.verify, nodes)


def time_rounds(
    head: FalconHead,
    model: PreTrainedModel,
    prompt: Sequence[int],
    settings: TreeSettings,
    progress: Callable[[], None] = lambda: None,
) -> RoundSeconds:
    """Generate with trees of every size and with chains of every number of passes, in turn."""
    size = head.shape.block_size
    # Nothing beyond the largest tree that is tried, nor a list longer than the head's vocabulary.
    largest = min(settings.max_nodes, head.head.size)
    counts = sorted({largest, *(count for count in settings.node_counts if count < largest)})
    bushes = {count: bush(count, min(size, settings.depth)) for count in counts}
    most = -(-settings.depth // size)
    chains = {n: RankTree.chain(min(n * size, settings.depth)) for n in range(1, most + 1)}
    text = prompt[-PROMPT_TOKENS:]
    verify: dict[int, list[float]] = {count: [] for count in bushes}
    draft: dict[int, list[float]] = {count: [] for count in chains}
    for repeat in range(settings.repeats + 1):
        for table, trees in ((verify, bushes), (draft, chains)):
            for key, tree in trees.items():
                way = {"spec_strategy": FalconConfig(tree=tree.paths), "assistant": head}
                stats = generate_greedily(model, text, settings.new_tokens, **way)
                if table is verify:
                    spent = (stats.verify_seconds + stats.other_seconds) / stats.target_forwards
                else:  # With the prompt nothing is drafted.
                    spent = stats.draft_seconds / max(stats.target_forwards - 1, 1)
                if repeat:  # The first round packs weights and warms caches.
                    table[key].append(spent)
                    progress()
    return RoundSeconds(
        {key: median(values) for key, values in verify.items()},
        {key: median(values) for key, values in draft.items()},
    )


def bush(num_nodes: int, depth: int) -> RankTree:
    """A tree of one pass: a chain, as deep as there are nodes for, and siblings of its first."""
    chain = RankTree.chain(min(depth, num_nodes)).paths
    return RankTree.of([*chain, *((rank,) for rank in range(1, num_nodes - len(chain) + 1))])


def _between(table: dict[int, float], at: int) -> float:
    sizes, seconds = zip(*sorted(table.items()), strict=True)
    return seconds[0] if len(sizes) == 1 else straight(sizes, seconds, at)
