"""SDSAT: the target drafts for itself after adaptive tokens.

Published loop, two forwards of the target (Liu et al. 2024, arXiv 2403.18647, section 2.1). The
first runs the last token and a chain of k adaptive ones: it says the next token for certain, and
what it predicts at the adaptive tokens are drafts for the k after that. The second runs the
certain token and the drafts, as a chain or as a tree of ranks, which verifies them: 2 to k + 2
tokens for two forwards. Adaptive tokens are virtual nodes of the draft tree, so their keys and
values go the way of rejected drafts.

With `fused=True`, our own step, every tree also carries adaptive chains after the nodes where the
walk may end, and what is predicted after its last accepted node is the next draft: 1 to k + 1
tokens for each forward. Where the walk ends without such a chain, the next tree is a chain alone.

Drafts depend on the text alone, so both are judged by node draw. The rule that the paper samples
by changes the distribution; it is there as `SdsatConfig(lossy=True)`.
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
from hf_spec.drafting.config import StrategyConfig
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
    tokens, options = _resolve(target, assistant)
    return SdsatDrafter(config, tokens, options.get("num_adaptive"))


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> SdsatDrafter:
    return _make(SdsatConfig(fused=True, batching=batching), target, assistant)


@register("sdsat", _make, _make_for_auto)
@dataclass(frozen=True)
class SdsatConfig(StrategyConfig):
    """Options of drafts after adaptive tokens.

    Attributes:
        num_adaptive: k, adaptive tokens in a row; None is the depth of the tree or, without one,
            what the adapter says.
        fused: draft and verify in one forward, see the module.
        tree: None is a chain of the likeliest tokens; "sdsat-5", "-7", "-9", "-11" and "-13" are
            the paper's; or a list of rank paths, see `hf_spec.drafting.rank_tree`.
        min_probability: drafts whose path is less probable than this, by what was predicted, are
            not sent; without any draft left, another adaptive chain is.
        max_adaptive_nodes: most adaptive nodes of a fused tree, the likeliest ones; None for all.
        lossy: when sampling, accept as the paper does (`PathSampling`). That changes the
            distribution of the output; greedy decoding stays exact.
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
                f"num_adaptive={self.num_adaptive}: the tree is {height} deep, and each depth "
                "needs an adaptive token; raise it, leave it out, or choose a flatter tree"
            )

    @property
    def rank_tree(self) -> RankTree | None:
        """The configured tree, None for a chain."""
        if self.tree is None:
            return None
        if isinstance(self.tree, str):
            return published_trees(METHOD)[self.tree].tree
        return RankTree(self.tree)


def chain_length(config: SdsatConfig, tokens: AdaptiveTokens, usual: object) -> int:
    """k: the configured one, the tree's depth, or what the adapter says; refused if too long."""
    length, tree = config.num_adaptive, config.rank_tree
    if length is None:
        length = tree.height if tree else usual if isinstance(usual, int) else tokens.shape.window
    longest = tokens.longest_chain
    if longest is not None and length > longest:
        raise OptionError(
            f"num_adaptive={length}: the adaptive tokens are diverse, {longest} of them, each for "
            f"a place of its own; choose at most {longest}, or train identical ones"
        )
    return length


class _Plan(TokenGraph):
    """A tree under construction for one row; `chains` has adaptive nodes by the node before."""

    def __init__(self, root: int):
        super().__init__([root])
        self.chains: dict[int, list[int]] = {}

    def ends(self) -> list[float]:
        """Per node the probability that the walk goes there and no further."""
        left = list(self.reach)
        for node, parent in enumerate(self.parents[1:], start=1):
            left[parent] -= self.reach[node]
        return left


# Per depth the predicted tokens with their probabilities, the likeliest first.
Predicted = Sequence[tuple[Sequence[int], Sequence[float]]]


class SdsatDrafter(Drafter):
    """Drafts what the target predicts at its adaptive tokens.

    `usual_length` is k where the config leaves it open.

    Attributes:
        counters: per row and forward of the target, "adaptive_rounds" are those that draft only
            (the paper's first forward), "verify_rounds" those that verify only, "fused_rounds"
            those that do both; "adaptive_nodes" counts the adaptive tokens run.
    """

    assisted_refusal_reason = (
        "adaptive tokens are run by the target itself, which assisted decoding does not do; use "
        "spec_strategy='sdsat'"
    )

    def __init__(self, config: SdsatConfig, tokens: AdaptiveTokens, usual_length: object = None):
        self.config = config
        self.virtual_tokens = tokens
        self.length = self.max_depth = chain_length(config, tokens, usual_length)
        self.tree = config.rank_tree or RankTree.chain(self.length)
        self._adaptive_ids = tokens.chain(self.length)
        self._plans: dict[int, _Plan] = {}
        self._said: dict[int, Tensor] = {}
        self.counters: dict[str, int] = {}

    def start(self, state: GenerationState) -> None:
        """Forget an earlier generation."""
        self._plans, self._said = {}, {}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.rule = PathSampling if self.config.lossy and state.do_sample else None
        self._processors = NodeProcessors(state.processors, state.num_rows, stateless_only=True)

    def restart(self, row: int) -> None:
        """Forget what was predicted to the sequence before."""
        self._said.pop(row, None)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Per unfinished row the newest drafts, adaptive tokens, or both."""
        predicted = self._predicted(state)
        self._plans = {}
        for row, limit in limits.items():
            plan = _Plan(state.tokens[row][-1])
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
        """Keep what was predicted after the last accepted node of each row."""
        self._said = {}
        starts, paths = verdict.tree.row_start, verdict.paths
        for row, plan in self._plans.items():
            path = paths[row]
            if chain := plan.chains.get(path[-1] if path else 0):
                # Those of a chain follow each other; a list of places would have to be sent.
                first, last = starts[row] + chain[0], starts[row] + chain[-1]
                self._said[row] = output.logits[first : last + 1]

    def _predicted(self, state: GenerationState) -> dict[int, Predicted]:
        """Per row what was predicted, as lists on the host; one transfer for all rows."""
        rows = [row for row in state.unfinished if row in self._said]
        if not rows:
            return {}
        said = [self._said[row] for row in rows]
        owners = [row for row, logits in zip(rows, said, strict=True) for _ in range(len(logits))]
        scores = torch.cat(said).to(state.device, torch.float32)
        # The tokens between are not known yet: the text so far stands in for a node's prefix.
        reads = self._processors.reads_prefix
        prefixes = state.prefixes(owners, [()] * len(owners)) if reads else None
        probs = distribution(self._processors(owners, prefixes, scores))
        likely, tokens = probs.topk(min(self.tree.num_ranks, probs.shape[-1]), dim=-1)
        found: dict[int, Any] = {row: [] for row in rows}
        for row, *lists in zip(owners, *fetch_all([tokens, likely]), strict=True):
            found[row].append(lists)
        return found

    def _add_drafts(
        self, plan: _Plan, predicted: Predicted, longest: int, state: GenerationState
    ) -> None:
        """Fill the rank tree from the lists; nothing below an end of sequence."""
        node_of: dict[tuple[int, ...], int] = {(): 0}
        for path in self.tree.paths:
            parent = node_of.get(path[:-1])
            depth, rank = len(path), path[-1]
            if parent is None or depth > min(longest, len(predicted)):
                continue
            tokens, likely = predicted[depth - 1]
            chance = likely[rank] if rank < len(likely) else 0.0
            if chance <= 0 or plan.reach[parent] * chance < self.config.min_probability:
                continue
            if not (parent and state.stop.ends_sequence(plan.tokens[parent])):
                node_of[path] = plan.add_node(parent, tokens[rank], chance)

    def _add_chain(self, plan: _Plan, node: int, length: int) -> None:
        chain = [node]
        for token in self._adaptive_ids[: max(length, 0)]:
            chain.append(plan.add_node(chain[-1], token))
        if len(chain) > 1:
            plan.chains[node] = chain[1:]

    def _add_chains(
        self, plan: _Plan, predicted: Predicted, limit: int, state: GenerationState
    ) -> None:
        """Adaptive chains after the nodes where the walk is likely to end.

        The j-th adaptive token after a node is worth the probability that the walk ends there,
        times that of the drafts before it being right, for which this round's own must stand in.
        """
        going_on = [1.0]
        for _, likely in list(predicted)[: self.length - 1]:
            going_on.append(going_on[-1] * likely[0])
        going_on += [going_on[-1]] * (self.length - len(going_on))
        cells = []
        for node, chance in enumerate(plan.ends()):
            if node and state.stop.ends_sequence(plan.tokens[node]):
                continue
            # After this node there are its bonus token and then the next draft.
            longest = min(self.length, limit - plan.depth[node] - 1)
            cells += [(-chance * going_on[place], place, node) for place in range(longest)]
        best = sorted(cells)[: self.config.max_adaptive_nodes]
        for node, length in Counter(node for _, _, node in best).items():
            self._add_chain(plan, node, length)

    def _count(self, plan: _Plan, drafted: bool) -> None:
        adaptive = sum(map(len, plan.chains.values()))
        self.counters["adaptive_nodes"] += adaptive
        if drafted or adaptive:
            kind = ("fused" if adaptive else "verify") if drafted else "adaptive"
            self.counters[f"{kind}_rounds"] += 1


def _resolve(target: PreTrainedModel, assistant: object) -> tuple[AdaptiveTokens, dict[str, Any]]:
    """The adaptive tokens for one generation; those of a folder are read once."""
    if not isinstance(assistant, (str, os.PathLike)):
        return adaptive_tokens(target, assistant)
    name = os.fspath(assistant)
    tokens, options = read_once(target, METHOD, name, lambda: adaptive_tokens(target, name))
    # Hooks belong to one generation, weights to all of them.
    return AdaptiveTokens(tokens.shape, tokens.embeddings, tokens.lora.weights), options
