"""Drafts grown level by level: a chain, a tree or a graph of tokens per row.

A drafter that says what may follow each node of a draft gets all else here: which nodes are drafted
on, when a length policy stops, what is sent. Chains follow Leviathan et al. 2023 (arXiv
2211.17192); trees keep the most probable paths (as in Miao et al. 2024, arXiv 2305.09781). With as
many children per node as nodes per level this is the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv
2406.16858, section 4): the beam of the w likeliest paths is drafted on, and of all that was drafted
the likeliest are sent. With merging on, repeated runs of tokens are drafted once
(`hf_spec.drafting.token_graph`).

When the target samples, a chain is sampled too and judged by residual rejection, which accepts with
probability 1 - TV(draft, target); a tree takes the top tokens and is judged by node draw. Option
`sample_drafts` changes either.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import fetch_all
from hf_spec.drafting.config import AUTO, PolicyConfig
from hf_spec.drafting.device_growth import DeviceGrowth, Plans
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.drafting.token_graph import TokenGraph, Unmerged
from hf_spec.drafting.tree_growth import Growth, TreeShape
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.decode.sampling import distribution, draw
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput

# Of a level: the graph of every row that grows, and its newest nodes, (row, node) each.
Graphs: TypeAlias = Mapping[int, TokenGraph]
Owners: TypeAlias = Sequence[tuple[int, int]]

COUNTERS = ("draft_nodes", "merges", "rounds", "rounds_with_merged_accepted")


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
    def selects_nodes_by_cost(self) -> bool:
        """Not of trees of ranks, which are given node by node, nor of what is drawn at random."""
        grows = self.shape.tree is None and self.shape.children > 1
        return super().selects_nodes_by_cost and grows and not self.draws

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


class LevelDrafter(Drafter):
    """Grows a chain, a tree or a graph per row; what may follow a node says `probabilities`.

    Attributes:
        counters: "draft_nodes", drafted whether or not the target saw them; "merges", edges made
            instead of nodes; "rounds", one per row and draft; "rounds_with_merged_accepted", those
            whose accepted path has a merge edge.
        graphs: per row the graph of the newest draft.
        ran: per row the nodes of its graph that have been expanded, see `Growth`.
        processors: the call's, by which drafts can be processed as the target's scores are; from
            `start` on.
        known: (R,) int64, the tokens that can be drafted; None if all can.
    """

    processors: NodeProcessors
    _plans: Plans
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
        self.ran: dict[int, list[int]] = {}

    @abstractmethod
    def probabilities(self, state: GenerationState, graphs: Graphs, owners: Owners) -> Tensor:
        """(nodes, R) float32: what may follow each (row, node) of the newest level.

        `graphs` are those of the rows that grow. R are the `known` tokens.
        """

    @property
    def supports_device_growth(self) -> bool:
        """Whether `propose_on_device` serves, and spares the host waiting for a device."""
        return False

    def propose_on_device(self, state: GenerationState, growing: DeviceGrowth) -> Tensor:
        """The same of the nodes that run next, whose tokens the device alone knows."""
        raise NotImplementedError

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
        rows = [row for row, _ in owners]
        if not self.processors.reads_prefix:
            return self.processed_unread(rows, logits)
        paths = [graphs[row].path(node) for row, node in owners]
        prefixes = state.prefixes(rows, paths)
        return distribution(self.processors(rows, prefixes, logits, self.known))

    def processed_unread(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        """The same of nodes of these rows, where no processor reads what is before them."""
        return distribution(self.processors(rows, None, logits, self.known))

    def start(self, state: GenerationState) -> None:
        """Counters, the rule that judges, and a policy that knows nothing."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.policy.start(state.num_rows)
        # Ranks are of likelihood, not of chance.
        self.samples = state.do_sample and self.config.draws and self.shape.tree is None
        self.rule = self.config.sampling_rule if state.do_sample else None
        self.processors = NodeProcessors(state.processors, state.num_rows, stateless_only=True)
        self._plans = Plans(self.shape, state.stop.ends, state.device)

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
            row: Growth(
                TokenGraph(state.tokens[row], self.shape.merge_length), self.shape, self.samples
            )
            for row in limits
        }
        self.ran = {row: growth.ran for row, growth in growths.items()}
        levels = {row: min(self.policy.limit(row), limit) for row, limit in limits.items()}
        levels = {row: count for row, count in levels.items() if count > 0}
        if levels and self._unwatched(max(levels.values())):
            self._grow_unwatched(state, growths, levels)
        else:
            self._grow_on_host(state, growths, levels)
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

    def _unwatched(self, depth: int) -> bool:
        """Whether drafts of so many levels may grow without a look at any of them."""
        asks = type(self.policy).goes_on is not LengthPolicy.goes_on
        # How many of the drawn siblings are sent goes by what was drawn before.
        scattered = self.samples and self.shape.children > 1
        if asks or scattered or self.processors.reads_prefix:
            return False
        return self.supports_device_growth and self._plans.fit(depth)

    def _grow_unwatched(
        self, state: GenerationState, growths: Mapping[int, Growth], limits: Mapping[int, int]
    ) -> None:
        """Queue all levels, then hang up what they found."""
        growing = DeviceGrowth(self._plans, limits)
        going_on = True
        while going_on:
            probs = self.propose_on_device(state, growing)
            tokens, chances = self._likeliest(probs)
            growing.add(tokens, chances, probs if self.samples else None)
            going_on = growing.descend()
        for level in growing.fetch():
            level.hang(growths, state.stop.ends_sequence)

    def _grow_on_host(
        self, state: GenerationState, growths: Mapping[int, Growth], limits: Mapping[int, int]
    ) -> None:
        """Run a level, hang up what it found, and see how to go on."""
        growing, level = list(limits), 0
        while growing:
            self._grow(state, {row: growths[row] for row in growing})
            level += 1
            growing = [r for r in growing if level < limits[r] and growths[r].frontier]
            if level >= self.config.min_draft_tokens:
                newest = [newest_of(row, growths[row], state.generated[row]) for row in growing]
                growing = list(compress(growing, self.policy.goes_on(newest)))

    def _grow(self, state: GenerationState, growths: Mapping[int, Growth]) -> None:
        """Run the frontier of every growing row and hang its children into the graphs."""
        graphs = {row: growth.graph for row, growth in growths.items()}
        owners = [(row, node) for row, growth in growths.items() for node in growth.begin_level()]
        probs = self.probabilities(state, graphs, owners)
        positions = [state.generated[row] + graphs[row].depth[node] for row, node in owners]
        scored = self.scores(probs, positions)
        found = [*self._likeliest(probs), *([scored] if scored is not None else [])]
        tokens, chances, *scores = fetch_all(found)
        for index, (row, node) in enumerate(owners):
            drawn_from = probs[index] if self.samples else None
            score = scores[0][index] if scores else 0.0
            growths[row].expand(node, tokens[index], chances[index], drawn_from, score)
        for growth in growths.values():
            growth.narrow(state.stop.ends_sequence)

    def _likeliest(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """(nodes, ranks) tokens that follow each node, int64, and their probabilities."""
        children = min(self.shape.num_ranks, probs.shape[-1])
        if self.samples:
            drawn = draw(probs, children)
            return self.token_ids(drawn), probs.gather(-1, drawn)
        likely, places = probs.topk(children, dim=-1)
        return self.token_ids(places), likely


def newest_of(row: int, growth: Growth, generated: int) -> DraftedToken:
    """What a length policy is asked about a row that has gained so many tokens."""
    graph = growth.graph
    best = max(growth.frontier, key=lambda node: graph.reach[node])
    parent, chance = growth.merged.get(best, (graph.parents[best], graph.probs[best]))
    return DraftedToken(
        row,
        graph.tokens[best],
        generated + graph.depth[parent],
        chance,
        growth.scores.get(parent, 0.0),
        min(1.0, sum(graph.reach[node] for node in growth.frontier)),
    )


def stacked(distributions: Sequence[Tensor | None]) -> Tensor | None:
    """(N, V) with zeros for nodes without children; None if no node has a distribution."""
    known = next((d for d in distributions if d is not None), None)
    if known is None:
        return None
    blank = torch.zeros_like(known)
    return torch.stack([blank if d is None else d for d in distributions])
