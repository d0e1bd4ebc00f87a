"""SDSAT rounds: drafts are what the target predicts at its adaptive tokens.

The published loop is in `hf_spec.methods.sdsat`. Adaptive tokens are virtual nodes of the draft
tree, so their keys and values are dropped like those of rejected drafts.

`fused=True`, ours: each draft tree also carries adaptive chains after the nodes where verification
may end; the predictions after the last accepted node are the next draft. A forward pass commits 1
to k + 1 tokens. If verification ends at a node without a chain, the next pass runs a chain alone.

Drafts depend only on committed tokens, so both are verified by node draw.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.backend.device.transfer import fetch_all
from hf_spec.common.errors import OptionError
from hf_spec.drafting.config import AssistantConfig, StrategyConfig
from hf_spec.drafting.lossy_rules import PathSampling
from hf_spec.drafting.rank_tree import RankTree, checked_tree, published_trees
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.decode.sampling import distribution
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.loading import read_once
from hf_spec.methods.registry import register
from hf_spec.methods.sdsat.adaptive_tokens import METHOD, AdaptiveTokens, adaptive_tokens

COUNTERS = ("adaptive_rounds", "verify_rounds", "fused_rounds", "adaptive_nodes")


def _make(config: SdsatConfig, target: PreTrainedModel, assistant: object) -> SdsatDrafter:
    if isinstance(assistant, (str, os.PathLike)):
        name = os.fspath(assistant)
        stored, options = read_once(target, METHOD, name, lambda: adaptive_tokens(target, name))
        # Hooks belong to one generation; weights are shared.
        tokens = AdaptiveTokens(stored.shape, stored.embeddings, stored.lora.weights)
    else:
        tokens, options = adaptive_tokens(target, assistant)
    return SdsatDrafter(config, tokens, options.get("num_adaptive"))


def _make_for_auto(
    target: PreTrainedModel, assistant: object, auto: AssistantConfig
) -> SdsatDrafter:
    return _make(SdsatConfig(fused=True, batching=auto.batching), target, assistant)


@register("sdsat", _make, _make_for_auto)
@dataclass(frozen=True)
class SdsatConfig(StrategyConfig):
    """Options of SDSAT drafts.

    Attributes:
        num_adaptive: k, adaptive tokens in a row; None for the depth of the tree or, without one,
            the adapter's default.
        fused: draft and verify in one forward pass, see the module.
        tree: None is a chain of the most probable tokens; "sdsat-5", "-7", "-9", "-11" and "-13"
            are the paper's trees; or a list of rank paths, see `hf_spec.drafting.rank_tree`.
        min_probability: drafts with a smaller predicted path probability are not sent; if none is
            left, the next pass runs an adaptive chain.
        max_adaptive_nodes: most adaptive nodes of a fused tree, the most useful ones; None for all.
        lossy: when sampling, accept as in the paper (`PathSampling`). This changes the distribution
            of the output; greedy decoding stays exact.
    """

    adapter_methods = (METHOD,)

    num_adaptive: int | None = None
    fused: bool = False
    tree: Any = None
    min_probability: float = 0.0
    max_adaptive_nodes: int | None = None
    lossy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_adaptive", "max_adaptive_nodes"):
            self.check(name, 1)
        self.check("min_probability", 0, 1)
        self.check_flags("fused", "lossy")
        if self.tree is not None:
            object.__setattr__(self, "tree", checked_tree(self.tree, METHOD))
        height = self.rank_tree and self.rank_tree.height
        if self.num_adaptive is not None and height and height > self.num_adaptive:
            raise OptionError(
                f"num_adaptive={self.num_adaptive}: the tree has depth {height}, and each depth "
                "needs an adaptive token; raise it, leave it out, or choose a flatter tree"
            )

    @property
    def rank_tree(self) -> RankTree | None:
        """Configured tree; None for a chain."""
        if self.tree is None:
            return None
        if isinstance(self.tree, str):
            return published_trees(METHOD)[self.tree].tree
        return RankTree(self.tree)


def chain_length(config: SdsatConfig, tokens: AdaptiveTokens, default: object) -> int:
    """Return k: the configured length, the tree's depth, the adapter's `default`, or L."""
    length, tree = config.num_adaptive, config.rank_tree
    if length is None:
        fallback = default if isinstance(default, int) else tokens.shape.window
        length = tree.height if tree else fallback
    longest = len(tokens.embeddings)
    if tokens.shape.diverse and length > longest:
        raise OptionError(
            f"num_adaptive={length}: there are {longest} diverse adaptive tokens, one per position "
            f"of a chain; choose at most {longest}, or train identical ones"
        )
    return length


class _DraftPlan(TokenGraph):
    """Draft tree of one row; `chains` are node -> adaptive nodes of the chain after it."""

    def __init__(self, root: int):
        super().__init__([root])
        self.chains: dict[int, list[int]] = {}

    def end_probabilities(self) -> list[float]:
        """Return per node the probability that it is the last accepted one."""
        ends = list(self.reach)
        for node, parent in enumerate(self.parents[1:], start=1):
            ends[parent] -= self.reach[node]
        return ends


# Per depth the predicted tokens and their probabilities, the most probable first.
Predicted = Sequence[tuple[Sequence[int], Sequence[float]]]


class SdsatDrafter(Drafter):
    """Drafts the target's predictions at its adaptive tokens.

    `default_length` is the adapter's k, for configs without one.

    Attributes:
        counters: per row and forward pass of the target, "adaptive_rounds" draft only (draft step 1
            of the paper), "verify_rounds" verify only, "fused_rounds" do both; "adaptive_nodes"
            counts adaptive tokens.
    """

    assisted_refusal_reason = (
        "adaptive tokens run in the target itself, which assisted decoding does not support; use "
        "spec_strategy='sdsat'"
    )

    def __init__(self, config: SdsatConfig, tokens: AdaptiveTokens, default_length: object = None):
        self.config = config
        self.virtual_tokens = tokens
        self.length = self.max_depth = chain_length(config, tokens, default_length)
        self.tree = config.rank_tree or RankTree.chain(self.length)
        self._adaptive_ids = tokens.chain(self.length)

    def start(self, state: GenerationState) -> None:
        """Reset plans, predictions and counters."""
        self._plans: dict[int, _DraftPlan] = {}
        self._chain_logits: dict[int, Tensor] = {}
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.rule = PathSampling if self.config.lossy and state.do_sample else None
        self._processors = NodeProcessors(state.processors, state.num_rows, stateless_only=True)

    def restart(self, row: int) -> None:
        """Forget the predictions of a row."""
        self._chain_logits.pop(row, None)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return per unfinished row a tree of drafts, adaptive tokens, or both."""
        predicted = self._predicted(state)
        self._plans = {}
        for row, limit in limits.items():
            plan = _DraftPlan(state.tokens[row][-1])
            self._add_drafts(plan, predicted.get(row, ()), limit, state)
            drafted = len(plan.tokens) > 1
            if self.config.fused:
                self._add_chains(plan, predicted.get(row, ()), limit, state)
            elif not drafted:
                self._add_chain(plan, 0, min(self.length, limit - 1))
            self._count(plan, drafted)
            self._plans[row] = plan
        drafts = {row: (plan.tokens, plan.parents) for row, plan in self._plans.items()}
        return DraftTree.from_drafts(drafts, state.num_rows)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Keep the predictions at the adaptive chain after the last accepted node of each row."""
        self._chain_logits = {}
        starts, paths = verdict.tree.row_start, verdict.paths
        for row, plan in self._plans.items():
            path = paths[row]
            if chain := plan.chains.get(path[-1] if path else 0):
                # Nodes of a chain are consecutive, so a slice avoids sending indices to the device.
                first, last = starts[row] + chain[0], starts[row] + chain[-1]
                self._chain_logits[row] = output.logits[first : last + 1]

    def _predicted(self, state: GenerationState) -> dict[int, Predicted]:
        """Return the predictions of each row on the host, with one transfer for all rows."""
        rows = [row for row in state.unfinished if row in self._chain_logits]
        if not rows:
            return {}
        logits = [self._chain_logits[row] for row in rows]
        owners = [row for row, part in zip(rows, logits, strict=True) for _ in range(len(part))]
        scores = torch.cat(logits).to(state.device, torch.float32)
        # Tokens in between are unknown, so processors get the committed text as every prefix.
        reads = self._processors.reads_prefix
        prefixes = state.prefixes(owners, [()] * len(owners)) if reads else None
        probs = distribution(self._processors(owners, prefixes, scores))
        top_probs, tokens = probs.topk(min(self.tree.num_ranks, probs.shape[-1]), dim=-1)
        predicted: dict[int, Any] = {row: [] for row in rows}
        for row, *lists in zip(owners, *fetch_all([tokens, top_probs]), strict=True):
            predicted[row].append(lists)
        return predicted

    def _add_drafts(
        self, plan: _DraftPlan, predicted: Predicted, longest: int, state: GenerationState
    ) -> None:
        """Fill the rank tree with predicted tokens; nothing follows an end of sequence."""
        node_of: dict[tuple[int, ...], int] = {(): 0}
        for path in self.tree.paths:
            parent = node_of.get(path[:-1])
            depth, rank = len(path), path[-1]
            if parent is None or depth > min(longest, len(predicted)):
                continue
            tokens, probs = predicted[depth - 1]
            prob = probs[rank] if rank < len(probs) else 0.0
            if prob <= 0 or plan.reach[parent] * prob < self.config.min_probability:
                continue
            if not (parent and state.stop.ends_sequence(plan.tokens[parent])):
                node_of[path] = plan.add_node(parent, tokens[rank], prob)

    def _add_chain(self, plan: _DraftPlan, node: int, length: int) -> None:
        chain = [node]
        for token in self._adaptive_ids[: max(length, 0)]:
            chain.append(plan.add_node(chain[-1], token))
        if len(chain) > 1:
            plan.chains[node] = chain[1:]

    def _add_chains(
        self, plan: _DraftPlan, predicted: Predicted, limit: int, state: GenerationState
    ) -> None:
        """Add adaptive chains after the nodes where verification is likely to end.

        The j-th adaptive token after a node is useful with the probability that the node is the
        last accepted one, times that of the drafts at slots before j, which is estimated from this
        round's predictions.
        """
        prefix_probs = [1.0]
        for _, probs in list(predicted)[: self.length - 1]:
            prefix_probs.append(prefix_probs[-1] * probs[0])
        prefix_probs += [prefix_probs[-1]] * (self.length - len(prefix_probs))
        candidates = []
        for node, end_prob in enumerate(plan.end_probabilities()):
            if node and state.stop.ends_sequence(plan.tokens[node]):
                continue
            # After this node come its bonus token and then the next draft.
            longest = min(self.length, limit - plan.depth[node] - 1)
            candidates += [(-end_prob * prefix_probs[slot], slot, node) for slot in range(longest)]
        best = sorted(candidates)[: self.config.max_adaptive_nodes]
        for node, length in Counter(node for _, _, node in best).items():
            self._add_chain(plan, node, length)

    def _count(self, plan: _DraftPlan, drafted: bool) -> None:
        adaptive = sum(map(len, plan.chains.values()))
        self.counters["adaptive_nodes"] += adaptive
        if drafted or adaptive:
            kind = ("fused" if adaptive else "verify") if drafted else "adaptive"
            self.counters[f"{kind}_rounds"] += 1
