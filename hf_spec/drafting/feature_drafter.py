"""Drafts from heads that read the target's hidden states and propose several levels at once.

A *feature head* looks at what the target thought of the newest tokens, once per round, and says for
each of its levels what may stand there; whether that depends on the tokens drafted before is its
own affair (`Proposals`). The draft grows from there like one of a draft model: a chain, the
likeliest paths, or a tree of ranks, drawn at random or not, ended by any length policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.decoding.state import GenerationState
from hf_spec.devices.transfer import send
from hf_spec.drafting.length_policy import HeadPolicy, LengthPolicy
from hf_spec.drafting.model_drafter import DraftModelConfig, DraftModelDrafter, _Growth
from hf_spec.execution.cpu_linear import fast_products
from hf_spec.execution.runner import ForwardOutput, ModelRunner
from hf_spec.execution.tree import DraftTree, Verdict


class Proposals(ABC):
    """What a head says of the rows of one draft, level by level.

    Attributes:
        confidence: of a head that says so, (M,) float32, the chance that what it proposes after
            each of the newest M nodes is accepted.
    """

    confidence: Tensor | None = None
    _rows: Tensor | None = None
    _level: int = -1

    @abstractmethod
    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """(M, V) logits of what follows M nodes of one level.

        Args:
            tokens: (M,) int64 of the nodes; the roots, at first.
            parents: (M,) int64, the place of each one's parent in the call before; at first, the
                place of its row.
        """

    def _descend(self, parents: Tensor) -> tuple[Tensor, int]:
        """(M,) int64 the rows of the nodes of the next level, and that level, from 0."""
        self._rows = parents if self._rows is None else self._rows[parents]
        self._level += 1
        return self._rows, self._level


class Lists(Proposals):
    """Lists that do not depend on what is drafted before, by (A, K, V) logits."""

    def __init__(self, logits: Tensor):
        self._logits = logits

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `Proposals`."""
        rows, level = self._descend(parents)
        return self._logits[rows, level]


class FeatureRunner(Protocol):
    """Runs a feature head, with whatever it keeps of each row.

    Attributes:
        forwards: passes of the head so far.
        device: where it takes tokens.
    """

    forwards: int
    device: torch.device

    def active(self) -> AbstractContextManager[Any]:
        """Make the head ready; it is as it was found when the block ends."""

    def restart(self, row: int) -> None:
        """Forget what was kept of `row`."""

    def knows(self, row: int) -> bool:
        """Whether any feature of `row` is known, without which nothing can be drafted."""

    def learn(self, spans: Mapping[int, tuple[int, int]], states: Sequence[Tensor]) -> None:
        """Take the hidden states of tokens that were committed, but for the newest of each row.

        Args:
            spans: row -> the position of the first of its tokens, and how many there are.
            states: of each of the wanted layers the (T, H) of all of them, row after row.
        """

    def propose(self, roots: Mapping[int, int], depth: int) -> Proposals:
        """Look at the rows whose last tokens are given, for a draft of so many levels."""


class FeatureHead(Protocol):
    """A head as its drafter sees it.

    Attributes:
        hidden_layers: indices of the hidden states that it reads.
        num_levels: most tokens that it proposes in a row.
    """

    hidden_layers: tuple[int, ...]
    num_levels: int

    def runner(self, num_rows: int) -> FeatureRunner:
        """Runs it for one generation."""

    def num_forwards(self, depth: int) -> int:
        """Passes that a draft of so many levels takes."""


class FeatureDrafter(DraftModelDrafter):
    """Grows a chain or a tree per row from what a feature head of `target` proposes."""

    # From `start` on.
    _runner: FeatureRunner  # type: ignore[assignment]
    _proposals: Proposals
    _places: dict[tuple[int, int], int]

    no_candidates = (
        "the head needs the target's hidden states, which assisted decoding does not hand on; use "
        "spec_strategy="
    )

    def __init__(
        self,
        config: DraftModelConfig,
        head: FeatureHead,
        target: PreTrainedModel,
        policy: LengthPolicy,
    ):
        super().__init__(config, target, policy)
        self.head = head
        self.hidden_layers = tuple(dict.fromkeys(head.hidden_layers))
        self.max_depth = min(policy.max_draft_tokens, head.num_levels)
        self.no_candidates = f"{type(self).no_candidates}{config.strategy!r}"
        self._roots: dict[int, int] = {}

    @property
    def timing_key(self) -> Hashable:
        """The head."""
        return id(self.head)

    def num_forwards(self, depth: int) -> int:
        """See `FeatureHead`."""
        return self.head.num_forwards(depth)

    def start(self, state: GenerationState) -> None:
        """Rows of which nothing is known."""
        self._runner = self.head.runner(state.num_rows)
        self._begin(state)

    def prefill(self, run: Callable[[ModelRunner], object]) -> None:
        """The target has seen the prompt; that is enough."""

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row."""
        self._roots = {row: len(state.tokens[row]) - 1 for row in limits}
        limits = {
            row: min(limit, self.max_depth) if self._runner.knows(row) else 0
            for row, limit in limits.items()
        }
        self._depth = max(limits.values(), default=0)
        return super().draft(state, limits)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the hidden states of the root and of what was accepted; tell the policy."""
        kept = output.kept_places(verdict)
        for row in kept:
            self.policy.observe(row, verdict.tree.height(row), len(verdict.accepted[row]))
        spans = {
            row: (self._roots[row] - len(output.pending.get(row, [])), len(mine))
            for row, mine in kept.items()
        }
        states = [output.hidden[layer] for layer in self.head.hidden_layers]
        places = torch.tensor([place for mine in kept.values() for place in mine])
        (index,) = send([places], states[0].device)
        self._runner.learn(spans, [found[index.to(found.device)] for found in states])

    @fast_products()
    def _logits(
        self,
        state: GenerationState,
        growths: dict[int, _Growth],
        tree: DraftTree,
        owners: Sequence[tuple[int, int]],
    ) -> Tensor:
        graphs = {row: growths[row].graph for row, _ in owners}
        if owners[0][1] == 0:
            self._proposals = self._runner.propose(
                {row: graph.tokens[0] for row, graph in graphs.items()}, self._depth
            )
            above = {(row, -1): place for place, row in enumerate(graphs)}
        else:
            above = self._places
        tokens = [graphs[row].tokens[node] for row, node in owners]
        parents = [above[row, graphs[row].parents[node]] for row, node in owners]
        self._places = {owner: place for place, owner in enumerate(owners)}
        pair = [torch.tensor(part) for part in (tokens, parents)]
        return self._proposals.after(*send(pair, self._runner.device))

    def _score(self, probs: Tensor, positions: Sequence[int]) -> Tensor | None:
        if isinstance(self.policy, HeadPolicy):
            return self._proposals.confidence
        return super()._score(probs, positions)
