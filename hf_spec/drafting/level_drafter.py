"""Drafts grown level by level: a chain, a tree or a graph of tokens per row.

A drafter that says what may follow each node of a draft gets all else here: which nodes are drafted
on, when a length policy stops, what is sent. Chains follow Leviathan et al. 2023 (arXiv
2211.17192); trees keep the most probable paths (as in Miao et al. 2024, arXiv 2305.09781). With as
many children per node as nodes per level this is the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv
2406.16858, section 4): the beam of the w likeliest paths is drafted on, and of all that was drafted
the likeliest are sent. With merging on, repeated runs of tokens are drafted once
(`hf_spec.drafting.graph`).

When the target samples, a chain is sampled too and judged by residual rejection, which accepts with
probability 1 - TV(draft, target); a tree takes the top tokens and is judged by node draw. Option
`sample_drafts` changes either.
"""

from __future__ import annotations

import heapq
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.processors import NodeProcessors
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.token_sampling import distribution, draw
from hf_spec.decoding.verification import Verifier
from hf_spec.devices.transfer import fetch_all
from hf_spec.drafting.config import AUTO, PolicyConfig
from hf_spec.drafting.graph import TokenGraph, Unmerged
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.drafting.rank_tree import Path, RankTree
from hf_spec.execution.forward_output import ForwardOutput
from hf_spec.execution.tree import DraftTree, Verdict

# Of a level: the graph of every row that grows, and its newest nodes, (row, node) each.
Graphs: TypeAlias = Mapping[int, TokenGraph]
Owners: TypeAlias = Sequence[tuple[int, int]]

COUNTERS = ("draft_nodes", "merges", "rounds", "rounds_with_merged_accepted")


@dataclass(frozen=True)
class TreeShape:
    """What bounds the growth of a draft, by the names of the options; a chain by default.

    A tree of ranks says which nodes there are; without one the likeliest paths grow.
    """

    tree: RankTree | None = None
    children: int = 1
    expanded_per_level: int = 1
    max_nodes: int = sys.maxsize
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0
    merge_length: int | None = None
    max_draft_nodes: int = sys.maxsize


@dataclass(frozen=True)
class LevelConfig(PolicyConfig):
    """Options of drafts that grow level by level; by themselves, those of a chain.

    Attributes:
        sample_drafts: draw the draft at random when the target samples.
    """

    sample_drafts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_flags("sample_drafts")

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn at random when the target samples."""
        return self.sample_drafts

    @property
    def shape(self) -> TreeShape:
        """The configured one."""
        given = {option.name: getattr(self, option.name, None) for option in fields(TreeShape)}
        return TreeShape(**{n: value for n, value in given.items() if value not in (None, AUTO)})

    @property
    def weighs_nodes(self) -> bool:
        """Not of trees of ranks, which are given node by node, nor of what is drawn at random."""
        grows = self.shape.tree is None and self.shape.children > 1
        return super().weighs_nodes and grows and not self.draws

    @property
    def sampling_rule(self) -> type[Verifier] | None:
        """What judges drafts when the target samples; None for the exact rule."""
        return None


class FewTokens(Protocol):
    """A head that knows some of the tokens: (R,) int64 `vocabulary` of `full_size`, None for all.

    It may be asked for their logits alone.
    """

    vocabulary: Tensor | None
    full_size: int


# Token, its probability, and the distribution that it comes from.
Drafted = tuple[int, float, Tensor]


@dataclass
class _Growth:
    """A draft under construction: the graph and the nodes to expand next, in order.

    Of nodes with children: the distribution that those were drawn from, where they were, and what
    the length policy made of it. Of the nodes of a tree of ranks: the ranks that lead to them. Of
    nodes likelier by a merge edge than by their own: the edge's parent and probability.
    """

    graph: TokenGraph
    # A set that keeps its order: wide drafts have thousands of nodes, each looked for here.
    frontier: dict[int, None] = field(default_factory=lambda: {0: None})
    distributions: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=lambda: {0: ()})
    merged: dict[int, tuple[int, float]] = field(default_factory=dict)

    def open(self, parent: int, child: int, chance: float) -> None:
        """Expand a likely child of `parent` on the next level, unless it has been expanded.

        It may be a leaf that a likely token was merged into: unlikely where it was drafted, likely
        here, so it grows on.
        """
        if child in self.scores:
            return
        reach = self.graph.reach
        if reach[parent] * chance > reach[child]:
            reach[child] = reach[parent] * chance
            self.merged[child] = parent, chance
        self.frontier[child] = None


class LevelDrafter(Drafter):
    """Grows a chain, a tree or a graph per row; what may follow a node says `probabilities`.

    Attributes:
        counters: "draft_nodes", drafted whether or not the target saw them; "merges", edges made
            instead of nodes; "rounds", one per row and draft; "rounds_with_merged_accepted", those
            whose accepted path has a merge edge.
        graphs: per row the graph of the newest draft.
        processors: the call's, by which drafts can be processed as the target's scores are; from
            `start` on.
        known: (R,) int64, the tokens that can be drafted; None if all can.
    """

    processors: NodeProcessors
    known: Tensor | None = None
    _vocab_size = 0

    def __init__(self, config: LevelConfig, policy: LengthPolicy):
        self.config = config
        self.shape = config.shape
        self.policy = policy
        self.max_depth = policy.max_draft_tokens
        self._sent: dict[int, Unmerged] = {}
        self.counters: dict[str, int] = {}
        self.graphs: dict[int, TokenGraph] = {}

    @abstractmethod
    def probabilities(self, state: GenerationState, graphs: Graphs, owners: Owners) -> Tensor:
        """(nodes, R) float32: what may follow each (row, node) of the newest level.

        `graphs` are those of the rows that grow. R are the `known` tokens.
        """

    def chains(
        self, state: GenerationState, limits: Mapping[int, int]
    ) -> dict[int, list[Drafted]] | None:
        """Per growing row a chain of so many levels that no host looked at; None if one has to."""
        return None

    def token_ids(self, places: Tensor) -> Tensor:
        """Token ids of places in what `probabilities` gives."""
        return places if self.known is None else self.known[places]

    def scores(self, probs: Tensor, positions: Sequence[int]) -> Tensor | None:
        """(nodes,) float32: what the length policy wants to know of these distributions."""
        return self.policy.score(probs, positions)

    def processed(
        self,
        state: GenerationState,
        graphs: Graphs,
        owners: Owners,
        logits: Tensor,
    ) -> Tensor:
        """(nodes, R) float32: the distributions of logits after the call's processors.

        Logits are those of the `known` tokens alone where no processor asks which these are.
        """
        rows, prefixes = [row for row, _ in owners], None
        if self.processors.reads_prefix:
            paths = [graphs[row].path(node) for row, node in owners]
            prefixes = state.prefixes(rows, paths)
        return distribution(self.processors(rows, prefixes, logits, self.known))

    def start(self, state: GenerationState) -> None:
        """Counters, the rule that judges, and a policy that knows nothing."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.policy.start(state.num_rows)
        # Ranks are of likelihood, not of chance.
        self.samples = state.do_sample and self.config.draws and self.shape.tree is None
        self.rule = self.config.sampling_rule if state.do_sample else None
        self.processors = NodeProcessors(state.processors, state.num_rows, stateless_only=True)

    def draft_few(self, head: FewTokens, device: torch.device) -> None:
        """Draft the tokens of this head alone."""
        if head.vocabulary is not None:
            self.known, self._vocab_size = head.vocabulary.to(device), head.full_size

    def restart(self, row: int) -> None:
        """A policy that knows nothing of the row."""
        self.policy.restart(row)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, one draft forward per level."""
        growths = {
            row: _Growth(TokenGraph(state.tokens[row], self.shape.merge_length)) for row in limits
        }
        levels = {row: min(self.policy.limit(row), limit) for row, limit in limits.items()}
        level = 0
        growing = [row for row in growths if levels[row] > 0]
        if (chains := self.chains(state, {row: levels[row] for row in growing})) is not None:
            for row, chain in chains.items():
                self._hang_chain(state, growths[row], chain)
            growing = []
        while growing:
            self._grow(state, growths, growing)
            level += 1
            growing = [r for r in growing if level < levels[r] and growths[r].frontier]
            if level >= self.config.min_draft_tokens:
                newest = [self._newest(state, row, growths[row]) for row in growing]
                growing = list(compress(growing, self.policy.goes_on(newest)))
        # Paths over merge edges may be deeper than what was drafted: this is what merging is for.
        self._sent = {
            row: growth.graph.spell_out()
            if self.samples
            else growth.graph.unmerge(self.shape.max_nodes, limits[row])
            for row, growth in growths.items()
        }
        self.graphs = {row: growth.graph for row, growth in growths.items()}
        for graph in self.graphs.values():
            self.counters["rounds"] += 1
            self.counters["draft_nodes"] += len(graph) - 1
            self.counters["merges"] += graph.num_merges
        distributions = [
            growths[row].distributions.get(node)
            for row in growths
            for node in self._sent[row].nodes
        ]
        probs = [prob for sent in self._sent.values() for prob in sent.probs]
        drafts = {row: (sent.tokens, sent.parents) for row, sent in self._sent.items()}
        drawn_from = self._among_all(stacked(distributions))
        return DraftTree.from_drafts(drafts, state.num_rows, drawn_from, probs)

    def _among_all(self, probs: Tensor | None) -> Tensor | None:
        """(N, R) distributions as (N, V), by which the target's own are compared with them."""
        if probs is None or self.known is None:
            return probs
        spread = probs.new_zeros(len(probs), self._vocab_size)
        spread[:, self.known] = probs
        return spread

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Tell the policy. The tree may be another, in which that of this drafter was joined."""
        self.policy.observe_all(verdict)

    def accepted(self, verdict: Verdict) -> list[list[int]]:
        """Tell the policy; per row the accepted nodes of its graph, up to a merge edge."""
        kept: list[list[int]] = [[] for _ in verdict.accepted]
        paths = verdict.paths
        for row, sent in self._sent.items():
            path = paths[row]
            # After a merge edge the stored keys and values belong to another path.
            valid = next((i for i, node in enumerate(path) if sent.merged[node]), len(path))
            self.counters["rounds_with_merged_accepted"] += valid < len(path)
            kept[row] = [sent.nodes[node] for node in path[:valid]]
            self.policy.observe(row, verdict.tree.height(row), len(path))
        return kept

    @staticmethod
    def _newest(state: GenerationState, row: int, growth: _Growth) -> DraftedToken:
        graph = growth.graph
        best = max(growth.frontier, key=lambda node: graph.reach[node])
        parent, chance = growth.merged.get(best, (graph.parents[best], graph.probs[best]))
        return DraftedToken(
            row,
            graph.tokens[best],
            state.generated[row] + graph.depth[parent],
            chance,
            growth.scores.get(parent, 0.0),
            min(1.0, sum(graph.reach[node] for node in growth.frontier)),
        )

    def _grow(
        self, state: GenerationState, growths: dict[int, _Growth], growing: Sequence[int]
    ) -> None:
        """Run the frontier of every growing row and hang its children into the graphs."""
        graphs = {row: growths[row].graph for row in growing}
        owners = [(row, node) for row in growing for node in growths[row].frontier]
        probs = self.probabilities(state, graphs, owners)
        ranks = self.shape.tree.num_ranks if self.shape.tree else self.shape.children
        children = min(ranks, probs.shape[-1])
        if self.samples:
            drawn = draw(probs, children)
            likely = probs.gather(-1, drawn)
        else:
            likely, drawn = probs.topk(children, dim=-1)
        positions = [state.generated[row] + growths[row].graph.depth[node] for row, node in owners]
        scored = self.scores(probs, positions)
        found = [self.token_ids(drawn), likely, *([scored] if scored is not None else [])]
        tokens, chances, *scores = fetch_all(found)
        for row in growing:
            growths[row].frontier = {}
        for index, (row, node) in enumerate(owners):
            growths[row].scores[node] = scores[0][index] if scores else 0.0
        for index, (row, node) in enumerate(owners):
            if self.samples:
                growths[row].distributions[node] = probs[index]
            self._hang(growths[row], node, tokens[index], chances[index])
        for row in growing:
            growth = growths[row]
            graph, reach = growth.graph, growth.graph.reach
            if len(graph) > self.shape.max_draft_nodes:
                growth.frontier = {}
            alive = [n for n in growth.frontier if not state.stop.ends_sequence(graph.tokens[n])]
            most = len(alive) if self.shape.tree else self.shape.expanded_per_level
            best = heapq.nsmallest(most, alive, key=lambda n: -reach[n])
            growth.frontier = dict.fromkeys(sorted(best))

    def _hang_chain(
        self, state: GenerationState, growth: _Growth, chain: Sequence[Drafted]
    ) -> None:
        """Hang up what was drafted, as far as it would have been, level by level."""
        for token, chance, probs in chain:
            (node,), growth.frontier = growth.frontier, {}
            growth.scores[node] = 0.0
            if self.samples:
                growth.distributions[node] = probs
            self._hang(growth, node, [token], [chance])
            if not growth.frontier or state.stop.ends_sequence(token):
                break

    def _hang(
        self, growth: _Growth, node: int, tokens: Sequence[int], chances: Sequence[float]
    ) -> None:
        if self.shape.tree is not None:
            _hang_ranks(self.shape.tree, growth, node, tokens, chances)
            return
        # Whether a drawn child is sent must not depend on what was drawn, or the draft would no
        # longer follow `draft_probs`: sampled trees stop growing by count alone.
        if self.samples and len(growth.graph) + len(tokens) > self.shape.max_nodes + 1:
            return
        for token, chance in zip(tokens, chances, strict=True):
            pruned = chance < self.shape.min_sibling_ratio * chances[0] and not self.samples
            if chance <= 0 or pruned or len(growth.graph) > self.shape.max_draft_nodes:
                continue
            growth.graph.add(node, token, chance)
            if chance >= self.shape.min_probability:
                growth.open(node, growth.graph.edges[node][-1][0], chance)


def _hang_ranks(
    tree: RankTree, growth: _Growth, node: int, tokens: Sequence[int], chances: Sequence[float]
) -> None:
    """The children that a tree of ranks has there; those with children of their own grow on."""
    above = growth.paths[node]
    for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
        path = (*above, rank)
        if path not in tree.places or chance <= 0:
            continue
        child = growth.graph.hang(node, token, chance)
        growth.paths[child] = path
        if path in tree.inner:
            growth.frontier[child] = None


def stacked(distributions: Sequence[Tensor | None]) -> Tensor | None:
    """(N, V) with zeros for nodes without children; None if no node has a distribution."""
    known = next((d for d in distributions if d is not None), None)
    if known is None:
        return None
    blank = torch.zeros_like(known)
    return torch.stack([blank if d is None else d for d in distributions])
