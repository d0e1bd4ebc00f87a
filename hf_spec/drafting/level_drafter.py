"""Drafts grown level by level: a chain, a tree or a graph of tokens per row.

Chains follow Leviathan et al. 2023 (arXiv 2211.17192); trees keep the most probable paths (as in
Miao et al. 2024, arXiv 2305.09781). With as many children per node as nodes per level this is the
dynamic tree of EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4): the w most probable paths are
expanded, and the most probable of all drafted nodes are sent. With merging, repeated runs of tokens
are drafted once (`hf_spec.drafting.token_graph`).

If the target samples, a chain is sampled, too. Residual rejection verifies it, which accepts a
token with probability 1 - TV(draft, target). A tree takes the top tokens and is verified by node
draw. Option `sample_drafts` changes either.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from hf_spec.backend.device import transfer
from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.config import AUTO, PolicyConfig
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.drafting.pass_plans import PassPlans
from hf_spec.drafting.token_graph import TokenGraph, UnmergedTree
from hf_spec.drafting.tree_growth import Growth, NextTokens, RowGrowth, TreeShape
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors, RowProcessors
from hf_spec.engine.decode.processor_steps import PREFIX_FREE
from hf_spec.engine.decode.sampling import distribution, draw
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.fast.graph_shapes import Program
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput

TREES = ("chain", "dynamic")
# Types of settings that are part of a key.
PLAIN = {bool, int, float, str, type(None)}
COUNTERS = ("draft_nodes", "merges", "rounds", "rounds_with_merged_accepted")


@dataclass(frozen=True)
class LevelConfig(PolicyConfig):
    """Options of drafts that grow level by level; a chain by default.

    Attributes:
        sample_drafts: draw the draft at random when the target samples.
    """

    sample_drafts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_flags("sample_drafts")

    @property
    def draws(self) -> bool:
        """True if drafts are drawn at random when the target samples."""
        return self.sample_drafts

    @property
    def shape(self) -> TreeShape:
        """The configured bounds of the draft."""
        values = {option.name: getattr(self, option.name, None) for option in fields(TreeShape)}
        return TreeShape(**{n: value for n, value in values.items() if value not in (None, AUTO)})

    @property
    def selects_nodes_by_cost(self) -> bool:
        """False for trees of ranks, whose nodes are configured, and for drawn drafts."""
        grows = self.shape.tree is None and self.shape.children > 1
        return super().selects_nodes_by_cost and grows and not self.draws

    @property
    def sampling_rule(self) -> type[Verifier] | None:
        """The verifier when the target samples; None for the exact one."""
        return None


@dataclass(frozen=True)
class BeamConfig(LevelConfig):
    """Options of a chain, or of EAGLE-2's dynamic tree; `max_draft_tokens` is its depth.

    Attributes:
        tree: "chain" or "dynamic".
        width: children per node, and expanded nodes per level, of a dynamic tree.
        max_nodes: most nodes sent to the target, root excluded, in order of path probability;
            "auto" lets the cost model choose them; None is the default number.
        sample_drafts: sample the draft when the target samples. Default: only for chains.
    """

    sizes = ("max_draft_tokens", "max_nodes")

    sample_drafts: bool | None = None  # type: ignore[assignment]
    tree: str = "chain"
    width: int = 4
    max_nodes: int | str | None = AUTO

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise OptionError(f"tree={self.tree!r} is unsupported; {choices(self.tree, TREES)}")
        super().__post_init__()
        self.check("width", 1)
        self.check("max_nodes", 1)

    @property
    def draws(self) -> bool:
        """True if drafts are drawn at random when the target samples."""
        return self.tree == "chain" if self.sample_drafts is None else self.sample_drafts

    @property
    def shape(self) -> TreeShape:
        """A chain, or a beam of `width`."""
        width = self.width if self.tree == "dynamic" else 1
        max_nodes = self.max_nodes if isinstance(self.max_nodes, int) else sys.maxsize
        return TreeShape(children=width, expanded_per_level=width, max_nodes=max_nodes)


class LevelDrafter(Drafter):
    """Grows a chain, a tree or a graph per row from the next-token probabilities of a model.

    Subclasses implement `probabilities`, or `next_tokens` if a pass predicts several levels.

    Attributes:
        counters: "draft_nodes", drafted nodes, sent or not; "merges", edges made instead of nodes;
            "rounds", one per row and draft; "rounds_with_merged_accepted", rounds whose accepted
            path has a merge edge.
        counted: the names of `counters`.
        graphs: row -> the graph of its last draft.
        expanded_nodes: row -> nodes of its graph that were run, see `RowGrowth`.
        processors: logits processors of the call that may be applied to drafts; from `start` on.
        draft_vocab_ids: (R,) int64 token ids that can be drafted; None for all.
        draft_device: device of the drafter's model; from `start` on.
    """

    counted: tuple[str, ...] = COUNTERS
    processors: NodeProcessors
    draft_vocab_ids: Tensor | None = None
    draft_device = torch.device("cpu")
    _plans: PassPlans
    _vocab_size = 0
    # R, from the first pass on.
    _num_choices = 0

    def __init__(self, config: LevelConfig, policy: LengthPolicy, shape: TreeShape | None = None):
        self.config = config
        self.shape = shape or config.shape
        self.policy = policy
        self.max_depth = policy.max_draft_tokens
        self._sent: dict[int, UnmergedTree] = {}
        self.counters: dict[str, int] = {}
        self.graphs: dict[int, TokenGraph] = {}
        self.expanded_nodes: dict[int, list[int]] = {}

    def probabilities(self, state: GenerationState, growth: Growth) -> Tensor:
        """Return the (M, R) float32 distributions over `draft_vocab_ids` after the M nodes."""
        raise NotImplementedError

    @property
    def supports_device_growth(self) -> bool:
        """True if drafts can grow on the device: if it works asynchronously."""
        return self.draft_device.type in transfer.ASYNCHRONOUS

    @property
    def step_graphs(self) -> StepGraphs | None:
        """CUDA graphs of the passes; None if a draft can never be one graph. Only while active.

        Else `prepare_pass` returns a `PreparedStep`, and `next_tokens` runs one step of these
        graphs per pass, with `growth.prepared`.
        """
        return None

    @property
    def program_key(self) -> Hashable:
        """Key of all that a pass computes, beyond shape and processors."""
        return type(self)

    def prepare_pass(self, state: GenerationState, growth: DeviceGrowth) -> Any:
        """Prepare on the host what `next_tokens` needs in the current pass; count it as run."""
        return None

    def token_ids(self, indices: Tensor) -> Tensor:
        """Return the token ids of columns of `probabilities`."""
        return indices if self.draft_vocab_ids is None else self.draft_vocab_ids[indices]

    def scores(self, state: GenerationState, growth: Growth, probs: Tensor) -> Tensor | None:
        """Return (M,) float32, the length policy's scores of distributions; None without any."""
        depths = zip(growth.owners, growth.node_depths(), strict=True)
        return self.policy.score(probs, [state.generated[row] + depth for row, depth in depths])

    def next_tokens(self, state: GenerationState, growth: Growth) -> NextTokens:
        """Return what may follow the nodes of `growth`: the top tokens, or draws."""
        probs = self.probabilities(state, growth)
        self._num_choices = probs.shape[-1]
        scores = self.scores(state, growth, probs) if self.policy_stops else None
        num_ranks = min(self.shape.num_ranks, probs.shape[-1])
        if self.samples:
            indices = draw(probs, num_ranks, growth.noise)
            chances = probs.gather(-1, indices)
        else:
            chances, indices = probs.topk(num_ranks, dim=-1)
        return NextTokens(
            self.token_ids(indices)[:, None],
            chances[:, None],
            probs if self.samples else None,
            None if scores is None else scores[:, None],
        )

    @property
    def policy_stops(self) -> bool:
        """True if the length policy may end a draft between two passes."""
        decides = type(self.policy).goes_on is not LengthPolicy.goes_on
        return decides and not (self.policy.plans_ahead and self.depth_is_planned)

    @property
    def depth_is_planned(self) -> bool:  # type: ignore[override]
        """See `Drafter`."""
        return self._fits_device_growth(self.max_depth)

    def processed(self, state: GenerationState, growth: Growth, logits: Tensor) -> Tensor:
        """Return the (M, R) float32 distributions of logits, after the call's processors.

        Logits are those of `draft_vocab_ids`, or of all tokens if a processor reads token ids.
        """
        rows, prefixes = growth.owners, None
        if self.processors.reads_prefix:
            prefixes = state.prefixes(rows, growth.paths())
        return distribution(self.processors(rows, prefixes, logits, self.draft_vocab_ids))

    def start(self, state: GenerationState) -> None:
        """Reset counters and policy, and choose the verifier."""
        self.counters = dict.fromkeys(self.counted, 0)
        self.policy.start(state.num_rows)
        # Ranks are an order of probability, so trees of ranks are never drawn.
        self.samples = state.do_sample and self.config.draws and self.shape.tree is None
        self.rule = self.config.sampling_rule if state.do_sample else None
        self.processors = NodeProcessors(state.processors, state.num_rows, stateless_only=True)
        self._plans = PassPlans(self.shape, state.stop.ends, state.device)

    def restrict_vocabulary(self, token_ids: Tensor | None, vocab_size: int) -> None:
        """Draft only the (R,) int64 `token_ids` of a target with `vocab_size` tokens."""
        if token_ids is not None:
            self.draft_vocab_ids, self._vocab_size = token_ids, vocab_size

    def restart(self, row: int) -> None:
        """Reset the policy of the row."""
        self.policy.restart(row)

    def max_levels(self, state: GenerationState, limits: Mapping[int, int]) -> Mapping[int, int]:
        """Return per row the most levels to draft; no pass runs rows with 0. Default: `limits`."""
        return limits

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one tree per unfinished row, from one pass per level over all rows."""
        drafts = {
            row: RowGrowth(
                TokenGraph(state.tokens[row], self.shape.merge_length),
                self.shape,
                state.stop.ends_sequence,
                min(self.policy.limit(row), most),
                self.samples,
            )
            for row, most in self.max_levels(state, limits).items()
        }
        self.expanded_nodes = {row: draft.expanded_nodes for row, draft in drafts.items()}
        if growing := {row: draft for row, draft in drafts.items() if draft.max_levels > 0}:
            self._grow(state, growing)
        self._sent = {row: self.choose_nodes(drafts[row], limits[row]) for row in drafts}
        self.graphs = {row: draft.graph for row, draft in drafts.items()}
        graphs = self.graphs.values()
        added = {
            "rounds": len(graphs),
            "draft_nodes": sum(len(graph) - 1 for graph in graphs),
            "merges": sum(graph.num_merges for graph in graphs),
        }
        self.counters = {n: count + added.get(n, 0) for n, count in self.counters.items()}
        distributions = [
            drafts[row].distributions.get(node) for row in drafts for node in self._sent[row].nodes
        ]
        probs = [prob for sent in self._sent.values() for prob in sent.probs]
        trees = {row: (sent.tokens, sent.parents) for row, sent in self._sent.items()}
        drawn_from = self._over_vocabulary(stacked(distributions))
        return DraftTree.from_drafts(trees, state.num_rows, drawn_from, probs)

    def choose_nodes(self, draft: RowGrowth, limit: int) -> UnmergedTree:
        """Return the nodes of a draft to send, at most `limit` levels."""
        if self.samples:
            return draft.graph.spell_out()
        # Paths over merge edges may be deeper than what was drafted: this is what merging is for.
        return draft.graph.unmerge(self.shape.max_nodes, limit)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Update the policy. The tree may join those of several drafters."""
        self.policy.observe_all(verdict)

    def accepted(self, verdict: Verdict) -> list[list[int]]:
        """Update the policy; return per row the accepted nodes of its graph, up to a merge edge."""
        nodes: list[list[int]] = [[] for _ in verdict.accepted]
        paths = verdict.paths
        for row, sent in self._sent.items():
            path = paths[row]
            # After a merge edge the stored keys and values belong to another path.
            valid = next((i for i, node in enumerate(path) if sent.merged[node]), len(path))
            self.counters["rounds_with_merged_accepted"] += valid < len(path)
            nodes[row] = [sent.nodes[node] for node in path[:valid]]
            self.policy.observe(row, verdict.tree.height(row), len(path))
        return nodes

    def _grow(self, state: GenerationState, drafts: Mapping[int, RowGrowth]) -> None:
        deepest = max(draft.max_levels for draft in drafts.values())
        if not self.policy_stops and self._fits_device_growth(deepest):
            self._grow_on_device(state, drafts)
            return
        growth = Growth(drafts)
        while growth.rows:
            growth.add(self.next_tokens(state, growth))
            rows = growth.next_rows()
            if self.policy_stops and growth.depth >= self.config.min_draft_tokens:
                newest = [newest_token(row, drafts[row], state.generated[row]) for row in rows]
                rows = list(compress(rows, self.policy.goes_on(newest)))
            growth.advance(rows)

    def _grow_on_device(self, state: GenerationState, drafts: Mapping[int, RowGrowth]) -> None:
        """Queue all passes, one by one or as one graph, and fetch their results."""
        graphs, processing = self.step_graphs, processors_key(state.processors)
        if self.processors.is_identity:
            processing = ()
        if graphs is not None and (not graphs.captures_programs or graphs.device != state.device):
            # One graph launches on one device, and nodes are chosen on the target's.
            graphs = None
        if graphs is None or processing is None or not self._num_choices:
            growth = DeviceGrowth(drafts, self._plans)
            self._queue(state, growth)
            growth.finish()
            return
        limits = {row: draft.max_levels for row, draft in drafts.items()}
        num_ranks = min(self.shape.num_ranks, self._num_choices)
        passes = self._plans.passes(limits, num_ranks)
        growth, prepared = DeviceGrowth(drafts, self._plans, passes), []
        while growth.rows:
            prepared.append(self.prepare_pass(state, growth))
            growth.skip()

        def compute(constants: list[Tensor], noise: Tensor | None) -> list[Tensor]:
            queued = DeviceGrowth(drafts, self._plans, passes, constants)
            queued.all_noise = noise
            self._queue(state, queued, prepared)
            return queued.outputs

        sizes = tuple(len(p.rows) for p in passes)
        program = Program(
            key=(self.program_key, self.shape, sizes, num_ranks, self.samples, processing),
            steps=[(part.tensors, part.step) for part in prepared],
            compute=compute,
            constants=self._plans.constants(passes),
            noise=(sum(sizes), self._num_choices) if self.samples else None,
        )
        growth.finish(graphs.run_program(program))

    def _queue(
        self, state: GenerationState, growth: DeviceGrowth, prepared: Sequence[Any] | None = None
    ) -> None:
        """Queue all passes; by default each is prepared just before it."""
        ready = None if prepared is None else iter(prepared)
        while growth.rows:
            growth.prepared = self.prepare_pass(state, growth) if ready is None else next(ready)
            growth.add(self.next_tokens(state, growth))
            growth.advance(growth.next_rows())

    def _fits_device_growth(self, depth: int) -> bool:
        """Return True if drafts can grow without fetching tokens, unless a policy reads them."""
        # The number of drawn siblings that are sent depends on what was drawn before.
        drawn_tree = self.samples and self.shape.children > 1
        if drawn_tree or self.processors.reads_prefix:
            return False
        return self.supports_device_growth and self._plans.fit(depth)

    def _over_vocabulary(self, probs: Tensor | None) -> Tensor | None:
        """Return (N, R) distributions as (N, V), to be compared with the target's."""
        if probs is None or self.draft_vocab_ids is None:
            return probs
        spread = probs.new_zeros(len(probs), self._vocab_size)
        spread[:, self.draft_vocab_ids] = probs
        return spread


def processors_key(processors: Sequence[Any]) -> Hashable | None:
    """Return a key of what processors do to the scores of drafts; None without any such key.

    Processors that read more than scores are not in the key: they skip drafts or read prefixes.
    """
    if any(isinstance(processor, RowProcessors) for processor in processors):
        # Rows begin with processors of their own.
        return None
    kept = [processor for processor in processors if type(processor) in PREFIX_FREE]
    if not all(type(value) in PLAIN for processor in kept for value in vars(processor).values()):
        return None
    return tuple((type(processor), *sorted(vars(processor).items())) for processor in kept)


def newest_token(row: int, draft: RowGrowth, generated: int) -> DraftedToken:
    """Return what a length policy reads of a row."""
    graph = draft.graph
    best = max(draft.frontier, key=lambda node: graph.reach[node])
    parent, chance = draft.merged.get(best, (graph.parents[best], graph.probs[best]))
    return DraftedToken(
        row,
        graph.tokens[best],
        generated + graph.depth[parent],
        chance,
        draft.scores.get(parent, 0.0),
        min(1.0, sum(graph.reach[node] for node in draft.frontier)),
    )


def stacked(distributions: Sequence[Tensor | None]) -> Tensor | None:
    """Return (N, V) distributions, zeros where there is none; None without any."""
    first = next((probs for probs in distributions if probs is not None), None)
    if first is None:
        return None
    blank = torch.zeros_like(first)
    return torch.stack([blank if probs is None else probs for probs in distributions])
