"""Drafts from a smaller model: a chain (`draft`) or a tree (`tree`), grown level by level.

Both are one drafter. Each level is one forward of the draft model over all rows; its keys and
values stay, so the draft model never sees a token twice. Chains follow Leviathan et al. 2023 (arXiv
2211.17192); trees keep the most probable paths (as in Miao et al. 2024, arXiv 2305.09781).

When the target samples, a chain is sampled too and judged by residual rejection, which accepts with
probability 1 - TV(draft, target); a tree takes the top tokens and is judged by node draw. Option
`sample_drafts` changes either.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.length_policy import LengthPolicy, make_policy
from hf_spec.decoding.processors import NodeProcessors
from hf_spec.decoding.runner import ForwardOutput, ModelRunner
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.tree import DraftTree, Verdict
from hf_spec.errors import OptionError
from hf_spec.models.assistant import resolve_draft_model
from hf_spec.strategies.base import StrategyConfig, register


def _make(config: DraftConfig, target: PreTrainedModel, assistant: object) -> DraftModelDrafter:
    return DraftModelDrafter(config, resolve_draft_model(config.strategy, assistant, target))


@register("draft", _make)
@dataclass(frozen=True)
class DraftConfig(StrategyConfig):
    """Options of a drafted chain.

    Attributes:
        max_draft_tokens: most tokens drafted in a round (levels, for a tree).
        length_policy: "static", "heuristic" or "confidence"; see `hf_spec.decoding.length_policy`.
        confidence_threshold: probability below which the "confidence" policy stops.
        sample_drafts: draw the draft at random when the target samples.
    """

    needs_assistant = True

    max_draft_tokens: int = 5
    length_policy: str = "static"
    confidence_threshold: float = 0.4
    sample_drafts: bool = True

    def __post_init__(self) -> None:
        self.check("max_draft_tokens", 1)
        self.check("confidence_threshold", 0, 1)
        self.make_policy()
        if not isinstance(self.sample_drafts, bool):
            raise OptionError(f"sample_drafts={self.sample_drafts!r} must be True or False")

    def make_policy(self) -> LengthPolicy:
        """The configured length policy."""
        return make_policy(self.length_policy, self.max_draft_tokens, self.confidence_threshold)

    @property
    def shape(self) -> TreeShape:
        """A chain: one child per node."""
        return TreeShape(children=1, expanded=1, max_nodes=self.max_draft_tokens)


@register("tree", _make)
@dataclass(frozen=True)
class TreeConfig(DraftConfig):
    """Options of a drafted tree; `max_draft_tokens` is its depth.

    Attributes:
        children: most children per node.
        expanded_per_level: most nodes per level that get children, the likeliest paths first.
        max_nodes: most nodes sent to the target, root excluded, the likeliest paths first.
        min_probability: a node less probable than this gets no children.
        min_sibling_ratio: a child less probable than this share of its best sibling is dropped.
    """

    sample_drafts: bool = False
    children: int = 3
    expanded_per_level: int = 4
    max_nodes: int = 15
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("children", "expanded_per_level", "max_nodes"):
            self.check(name, 1)
        for name in ("min_probability", "min_sibling_ratio"):
            self.check(name, 0, 1)

    @property
    def shape(self) -> TreeShape:
        """The configured tree."""
        return TreeShape(
            self.children,
            self.expanded_per_level,
            self.max_nodes,
            self.min_probability,
            self.min_sibling_ratio,
        )


@dataclass(frozen=True)
class TreeShape:
    """What bounds the growth of a draft tree; the names are those of `TreeConfig`."""

    children: int
    expanded: int
    max_nodes: int
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0


@dataclass
class _RowGrowth:
    """A tree under construction; `reach` is the probability of the path to each node."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    reach: list[float] = field(default_factory=lambda: [1.0])
    depth: list[int] = field(default_factory=lambda: [0])
    frontier: list[int] = field(default_factory=lambda: [0])
    distributions: dict[int, Tensor] = field(default_factory=dict)

    def add(self, parent: int, token: int, probability: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(self.reach[parent] * probability)
        self.depth.append(self.depth[parent] + 1)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Tokens from the root's first descendant down to `node`."""
        tokens = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def best(self, count: int) -> list[int]:
        """The root and the `count` most probable nodes; a parent never ranks below its child."""
        others = range(1, len(self.tokens))
        return [0, *sorted(heapq.nsmallest(count, others, key=lambda n: (-self.reach[n], n)))]


class DraftModelDrafter(Drafter):
    """Grows a chain or tree per row with a draft model.

    Args:
        config: shape, length policy and sampling.
        model: the draft model; shares the target's vocabulary.
    """

    def __init__(self, config: DraftConfig, model: PreTrainedModel):
        self.config = config
        self.shape = config.shape
        self.model = model
        self.policy = config.make_policy()
        self._runner: ModelRunner | None = None
        self._origin: list[list[int]] = []

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forward passes of the draft model."""
        return self._runner.forwards if self._runner is not None else 0

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Make the draft model ready; it is as it was found afterwards."""
        if self._runner is None or len(self._runner.stored) != state.num_rows:
            self._runner = ModelRunner(self.model, state.num_rows)
            self.policy.start(state.num_rows)
        self.samples = state.do_sample and self.config.sample_drafts
        self._processors = NodeProcessors(state.processors, state.num_rows, stateless_only=True)
        with self._runner.active():
            yield

    def draft(self, state: GenerationState) -> DraftTree:
        """One tree per unfinished row, one draft forward per level."""
        growths = {row: _RowGrowth([state.tokens[row][-1]]) for row in state.unfinished}
        limits = {row: min(self.policy.limit(row), state.room(row) - 1) for row in growths}
        level = 0
        growing = [row for row in growths if limits[row] > 0]
        while growing:
            self._grow(state, growths, growing)
            level += 1
            growing = [
                row
                for row in growing
                if level < limits[row]
                and growths[row].frontier
                and self._goes_on(row, growths[row], level)
            ]
        return self._finish(state, growths)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Keep the accepted part of the draft model's keys and values; tell the policy."""
        assert self._runner is not None, "observe comes after draft"
        host = verdict.tree.host
        paths = [
            [origin[offset] for offset in path]
            for origin, path in zip(self._origin, verdict.paths, strict=True)
        ]
        self._runner.keep(paths)
        for row, path in enumerate(paths):
            if host.nodes(row):
                self.policy.observe(row, host.height(row), len(path))

    def _goes_on(self, row: int, growth: _RowGrowth, level: int) -> bool:
        best = max(growth.frontier, key=lambda node: growth.reach[node])
        above = growth.reach[growth.parents[best]]
        return self.policy.goes_on(row, level - 1, growth.reach[best] / above if above else 0.0)

    def _grow(
        self, state: GenerationState, growths: dict[int, _RowGrowth], growing: Sequence[int]
    ) -> None:
        """Run the frontier of every growing row and hang its children into the trees."""
        tree = self._tree(state, {row: growths[row] for row in growing})
        starts = tree.host.row_start
        owners = [(row, node) for row in growing for node in growths[row].frontier]
        assert self._runner is not None
        output = self._runner.forward(
            tree, state.tokens, [starts[row] + node for row, node in owners]
        )
        rows = [row for row, _ in owners]
        prefixes = None
        if self._processors.reads_prefix:
            # A copy each: prefixes of one row share the space behind its committed tokens.
            prefixes = [state.prefix(row, growths[row].path(node)).clone() for row, node in owners]
        logits = output.logits.to(state.frames.device, torch.float32)
        probs = self._processors(rows, prefixes, logits).softmax(dim=-1)
        if self.samples:
            drawn = torch.multinomial(probs, self.shape.children)
            likely = probs.gather(-1, drawn)
        else:
            likely, drawn = probs.topk(self.shape.children, dim=-1)
        chances, tokens = likely.tolist(), drawn.tolist()
        for row in growing:
            growths[row].frontier = []
        for index, (row, node) in enumerate(owners):
            growth = growths[row]
            if self.samples:
                growth.distributions[node] = probs[index]
            self._hang(growth, node, tokens[index], chances[index])
        for row in growing:
            growth = growths[row]
            best = heapq.nsmallest(
                self.shape.expanded, growth.frontier, key=lambda n: -growth.reach[n]
            )
            growth.frontier = sorted(best)

    def _hang(
        self, growth: _RowGrowth, node: int, tokens: Sequence[int], chances: Sequence[float]
    ) -> None:
        # Whether a drawn child is sent must not depend on what was drawn, or the draft would no
        # longer follow `draft_probs`: sampled trees stop growing by count alone.
        if self.samples and len(growth.tokens) + len(tokens) > self.shape.max_nodes + 1:
            return
        for token, chance in zip(tokens, chances, strict=True):
            pruned = chance < self.shape.min_sibling_ratio * chances[0] and not self.samples
            if chance <= 0 or pruned:
                continue
            child = growth.add(node, token, chance)
            if chance >= self.shape.min_probability:
                growth.frontier.append(child)

    def _tree(self, state: GenerationState, growths: dict[int, _RowGrowth]) -> DraftTree:
        rows: list[tuple[list[int], list[int]]] = [([], []) for _ in state.tokens]
        for row, growth in growths.items():
            rows[row] = (growth.tokens, growth.parents)
        return DraftTree.from_rows(rows, device=state.frames.device)

    def _finish(self, state: GenerationState, growths: dict[int, _RowGrowth]) -> DraftTree:
        """The tree for the target: the most probable nodes, renumbered."""
        rows: list[tuple[list[int], list[int]]] = [([], []) for _ in state.tokens]
        self._origin = [[] for _ in state.tokens]
        distributions: list[Tensor | None] = []
        for row, growth in growths.items():
            everything = len(growth.tokens)
            kept = growth.best(everything if self.samples else self.shape.max_nodes)
            place = {node: index for index, node in enumerate(kept)}
            self._origin[row] = kept
            parents = [-1, *(place[growth.parents[node]] for node in kept[1:])]
            rows[row] = ([growth.tokens[node] for node in kept], parents)
            distributions.extend(growth.distributions.get(node) for node in kept)
        return DraftTree.from_rows(rows, state.frames.device, _stack(distributions))


def _stack(distributions: Sequence[Tensor | None]) -> Tensor | None:
    """(N, V) with zeros for nodes without children; None if no node has a distribution."""
    known = next((d for d in distributions if d is not None), None)
    if known is None:
        return None
    blank = torch.zeros_like(known)
    return torch.stack([blank if d is None else d for d in distributions])
