"""Drafts from a smaller model: a graph of tokens per row, grown level by level.

Each level is one forward of the draft model over all rows; its keys and values stay, so the draft
model never sees a token twice. Chains follow Leviathan et al. 2023 (arXiv 2211.17192); trees keep
the most probable paths (as in Miao et al. 2024, arXiv 2305.09781); with merging on, repeated runs
of tokens are drafted once (`hf_spec.drafting.graph`).

When the target samples, a chain is sampled too and judged by residual rejection, which accepts with
probability 1 - TV(draft, target); a tree takes the top tokens and is judged by node draw. Option
`sample_drafts` changes either.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.processors import NodeProcessors
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.token_sampling import distribution, draw
from hf_spec.decoding.verification import Verifier
from hf_spec.devices.transfer import fetch_all
from hf_spec.drafting.config import PolicyConfig
from hf_spec.drafting.graph import TokenGraph, Unmerged
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy, make_policy
from hf_spec.errors import OptionError, choices
from hf_spec.execution.runner import ForwardOutput, ModelRunner
from hf_spec.execution.tree import DraftTree, Verdict

# How drafts of a model with another tokenizer become the target's tokens.
TRANSLATIONS = ("shared", "text")
COUNTERS = ("draft_nodes", "merges", "rounds", "rounds_with_merged_accepted")


@dataclass(frozen=True)
class TreeShape:
    """What bounds the growth of a draft, by the names of the options; a chain by default."""

    children: int = 1
    expanded_per_level: int = 1
    max_nodes: int = sys.maxsize
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0
    merge_length: int | None = None
    max_draft_nodes: int = sys.maxsize


@dataclass(frozen=True)
class DraftModelConfig(PolicyConfig):
    """Options of drafts from a model; by themselves, those of a chain.

    Attributes:
        sample_drafts: draw the draft at random when the target samples.
        translation: of drafts from a model with another tokenizer (see
            `hf_spec.drafting.other_tokens`): "shared" drafts what both vocabularies have, "text"
            encodes again what was drafted. None is "shared" if these are half of the target's.
    """

    takes_tokenizers = True

    sample_drafts: bool = True
    translation: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_flags("sample_drafts")
        if self.translation not in (None, *TRANSLATIONS):
            raise OptionError(
                f"translation={self.translation!r}; {choices(self.translation, TRANSLATIONS)}"
            )

    @property
    def shape(self) -> TreeShape:
        """The configured one."""
        given = {option.name: getattr(self, option.name, None) for option in fields(TreeShape)}
        return TreeShape(**{name: value for name, value in given.items() if value is not None})

    @property
    def sampling_rule(self) -> type[Verifier] | None:
        """What judges drafts when the target samples; None for the exact rule."""
        return None


@dataclass
class _Growth:
    """A draft under construction: the graph and the nodes to expand next.

    Of nodes with children: the distribution that those were drawn from, where they were, and what
    the length policy made of it.
    """

    graph: TokenGraph
    frontier: list[int] = field(default_factory=lambda: [0])
    distributions: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)


class DraftModelDrafter(Drafter):
    """Grows a chain, a tree or a graph per row with a draft model of the target's vocabulary.

    By default the policy is the configured one, if it needs no adapter. `vocab_size` is V of the
    target, where the draft model's own differs by padding.

    Attributes:
        counters: "draft_nodes", drafted whether or not the target saw them; "merges", edges made
            instead of nodes; "rounds", one per row and draft; "rounds_with_merged_accepted", those
            whose accepted path has a merge edge.
        graphs: per row the graph of the newest draft.
    """

    # From `start` on.
    _runner: ModelRunner

    def __init__(
        self,
        config: DraftModelConfig,
        model: PreTrainedModel,
        policy: LengthPolicy | None = None,
        vocab_size: int | None = None,
    ):
        self.config = config = config.resolve(measures=False)
        self.shape = config.shape
        self.model = model
        self.policy = policy or make_policy(config, model)
        self.max_depth = self.policy.max_draft_tokens
        self.vocab_size = vocab_size
        self._sent: dict[int, Unmerged] = {}
        self.counters: dict[str, int] = {}
        self.graphs: dict[int, TokenGraph] = {}

    @property
    def timing_key(self) -> Hashable:
        """The draft model."""
        return id(self.model)

    def start(self, state: GenerationState) -> None:
        """Empty keys and values for every row."""
        self._runner = self._make_runner(state.num_rows)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.policy.start(state.num_rows)
        self.samples = state.do_sample and self.config.sample_drafts
        self.rule = self.config.sampling_rule if state.do_sample else None
        self._processors = NodeProcessors(state.processors, state.num_rows, stateless_only=True)

    def _make_runner(self, num_rows: int) -> ModelRunner:
        batching, size = self.config.batching, self.vocab_size
        return ModelRunner(self.model, num_rows, batching=batching, vocab_size=size)

    def restart(self, row: int) -> None:
        """Empty keys and values for one row, and a policy that knows nothing of it."""
        self._runner.restart(row)
        self.policy.restart(row)

    def prefill(self, run: Callable[[ModelRunner], object]) -> None:
        """Let the draft model run a prompt that is more than tokens."""
        assert self._runner is not None, "prompts run while active"
        run(self._runner)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, one draft forward per level."""
        growths = {
            row: _Growth(TokenGraph(state.tokens[row], self.shape.merge_length)) for row in limits
        }
        limits = {row: min(self.policy.limit(row), limit) for row, limit in limits.items()}
        level = 0
        growing = [row for row in growths if limits[row] > 0]
        while growing:
            self._grow(state, growths, growing)
            level += 1
            growing = [r for r in growing if level < limits[r] and growths[r].frontier]
            if level >= self.config.min_draft_tokens:
                newest = [self._newest(state, row, growths[row]) for row in growing]
                growing = list(compress(growing, self.policy.goes_on(newest)))
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
        return DraftTree.from_drafts(drafts, state.num_rows, _stack(distributions), probs)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Keep the accepted part of the draft model's keys and values; tell the policy."""
        kept: list[list[int]] = [[] for _ in verdict.accepted]
        paths = verdict.paths
        for row, sent in self._sent.items():
            path = paths[row]
            # After a merge edge the stored keys and values belong to another path.
            valid = next((i for i, node in enumerate(path) if sent.merged[node]), len(path))
            self.counters["rounds_with_merged_accepted"] += valid < len(path)
            kept[row] = [sent.nodes[node] for node in path[:valid]]
            self.policy.observe(row, verdict.tree.height(row), len(path))
        self._runner.keep(kept)

    @staticmethod
    def _newest(state: GenerationState, row: int, growth: _Growth) -> DraftedToken:
        graph = growth.graph
        best = max(growth.frontier, key=lambda node: graph.reach[node])
        parent = graph.parents[best]
        return DraftedToken(
            row,
            graph.tokens[best],
            state.generated[row] + graph.depth[parent],
            graph.probs[best],
            growth.scores.get(parent, 0.0),
            min(1.0, sum(graph.reach[node] for node in growth.frontier)),
        )

    def _grow(
        self, state: GenerationState, growths: dict[int, _Growth], growing: Sequence[int]
    ) -> None:
        """Run the frontier of every growing row and hang its children into the graphs."""
        graphs = {row: growths[row].graph for row in growing}
        drafts = {row: (graph.tokens, graph.parents) for row, graph in graphs.items()}
        tree = DraftTree.from_drafts(drafts, state.num_rows)
        owners = [(row, node) for row in growing for node in growths[row].frontier]
        probs = self._probabilities(state, growths, tree, owners)
        children = min(self.shape.children, probs.shape[-1])
        if self.samples:
            drawn = draw(probs, children)
            likely = probs.gather(-1, drawn)
        else:
            likely, drawn = probs.topk(children, dim=-1)
        positions = [state.generated[row] + growths[row].graph.depth[node] for row, node in owners]
        scored = self.policy.score(probs, positions)
        found = [drawn, likely, *([scored] if scored is not None else [])]
        tokens, chances, *scores = fetch_all(found)
        for row in growing:
            growths[row].frontier = []
        for index, (row, node) in enumerate(owners):
            growths[row].scores[node] = scores[0][index] if scores else 0.0
            if self.samples:
                growths[row].distributions[node] = probs[index]
            self._hang(growths[row], node, tokens[index], chances[index])
        for row in growing:
            growth = growths[row]
            graph, reach = growth.graph, growth.graph.reach
            if len(graph) > self.shape.max_draft_nodes:
                growth.frontier = []
            alive = [n for n in growth.frontier if not state.stop.ends_sequence(graph.tokens[n])]
            best = heapq.nsmallest(self.shape.expanded_per_level, alive, key=lambda n: -reach[n])
            growth.frontier = sorted(best)

    def _probabilities(
        self,
        state: GenerationState,
        growths: dict[int, _Growth],
        tree: DraftTree,
        owners: Sequence[tuple[int, int]],
    ) -> Tensor:
        """(nodes, V) float32: the draft model's distribution after each (row, node)."""
        starts = tree.row_start
        nodes = [starts[row] + node for row, node in owners]
        output = self._runner.forward(tree, state.tokens, nodes)
        rows, prefixes = [row for row, _ in owners], None
        if self._processors.reads_prefix:
            paths = [growths[row].graph.path(node) for row, node in owners]
            prefixes = state.prefixes(rows, paths)
        logits = output.logits.to(state.device, torch.float32)
        return distribution(self._processors(rows, prefixes, logits))

    def _hang(
        self, growth: _Growth, node: int, tokens: Sequence[int], chances: Sequence[float]
    ) -> None:
        # Whether a drawn child is sent must not depend on what was drawn, or the draft would no
        # longer follow `draft_probs`: sampled trees stop growing by count alone.
        if self.samples and len(growth.graph) + len(tokens) > self.shape.max_nodes + 1:
            return
        for token, chance in zip(tokens, chances, strict=True):
            pruned = chance < self.shape.min_sibling_ratio * chances[0] and not self.samples
            if chance <= 0 or pruned or len(growth.graph) > self.shape.max_draft_nodes:
                continue
            child = growth.graph.add(node, token, chance)
            if child is not None and chance >= self.shape.min_probability:
                growth.frontier.append(child)


def _stack(distributions: Sequence[Tensor | None]) -> Tensor | None:
    """(N, V) with zeros for nodes without children; None if no node has a distribution."""
    known = next((d for d in distributions if d is not None), None)
    if known is None:
        return None
    blank = torch.zeros_like(known)
    return torch.stack([blank if d is None else d for d in distributions])
