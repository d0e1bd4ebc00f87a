"""Drafts from heads that read the target's hidden states once and predict several levels.

The predictions of a level may depend on the tokens drafted before (`Proposals`). The draft grows
level by level like others, with any length policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import send
from hf_spec.drafting.length_policy import HeadPolicy, LengthPolicy
from hf_spec.drafting.level_drafter import LevelConfig, LevelDrafter
from hf_spec.drafting.tree_growth import Growth
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.fast.packed_linear import use_packed_linears
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput


class Proposals(ABC):
    """A head's predictions for the rows of one draft, level by level.

    Attributes:
        confidence: (M,) float32, the probability that what follows each of the newest M nodes is
            accepted; None without a confidence head.
    """

    confidence: Tensor | None = None
    _rows: Tensor | None = None
    _level: int = -1

    @abstractmethod
    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return (M, V) logits of the tokens after the M nodes of the next level.

        Args:
            tokens: (M,) int64 of the nodes; the roots in the first call.
            parents: (M,) int64, the index of each node's parent in the call before; of a root the
                index of its row.
        """

    def _descend(self, parents: Tensor) -> tuple[Tensor, int]:
        """Return (M,) int64 row indices of the nodes of the next level, and that level, from 0."""
        self._rows = parents if self._rows is None else self._rows[parents]
        self._level += 1
        return self._rows, self._level


class FixedProposals(Proposals):
    """Predictions that do not depend on the tokens drafted before: (A, K, V) logits."""

    def __init__(self, logits: Tensor):
        self._logits = logits

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `Proposals`."""
        rows, level = self._descend(parents)
        return self._logits[rows, level]


class ProposalRunner(Protocol):
    """Runs a head on `device`, and stores what it needs of each row."""

    forwards: int
    device: torch.device

    def active(self) -> AbstractContextManager[Any]:
        """Prepare the head; it is restored when the block ends."""

    def restart(self, row: int) -> None:
        """Drop what is stored of `row`."""

    def knows(self, row: int) -> bool:
        """Return True if there are hidden states of `row`, without which it cannot draft."""

    def learn(self, spans: Mapping[int, tuple[int, int]], states: Sequence[Tensor]) -> None:
        """Store the hidden states of committed tokens; the newest of each row has none yet.

        `spans` maps a row to the position of the first of its T tokens, and T; `states` has one
        (sum of T, H) tensor per layer of `hidden_layers`, row after row.
        """

    def propose(self, roots: Mapping[int, int], depth: int) -> Proposals:
        """Run the rows, given by their last tokens, for a draft of `depth` levels."""


class ProposalHead(Protocol):
    """Head that reads `hidden_layers` and predicts at most `num_levels` tokens in a row."""

    hidden_layers: tuple[int, ...]
    num_levels: int

    @property
    def timing_key(self) -> Hashable:
        """See `Drafter`."""

    def num_forwards(self, depth: int) -> int:
        """See `Drafter`."""


class ProposalDrafter(LevelDrafter):
    """Grows a chain or a tree per row from the `Proposals` of a head."""

    # From `start` on.
    _runner: ProposalRunner
    _proposals: Proposals

    def __init__(
        self,
        config: LevelConfig,
        head: ProposalHead,
        make_runner: Callable[[GenerationState], ProposalRunner],
        policy: LengthPolicy,
    ):
        super().__init__(config, policy)
        self.head = head
        self._make_runner = make_runner
        self.hidden_layers = tuple(dict.fromkeys(head.hidden_layers))
        self.max_depth = min(self.max_depth, head.num_levels)
        self.assisted_refusal_reason = (
            "the head needs the target's hidden states, which assisted decoding does not provide; "
            f"use spec_strategy={config.strategy!r}"
        )
        self._root_positions: dict[int, int] = {}

    @property
    def timing_key(self) -> Hashable:
        """Key of the head's times."""
        return self.head.timing_key

    def num_forwards(self, depth: int) -> int:
        """See `Drafter`."""
        return self.head.num_forwards(depth)

    def start(self, state: GenerationState) -> None:
        """Begin without hidden states of any row."""
        super().start(state)
        self._runner = self._make_runner(state)
        self.draft_device = self._runner.device

    def restart(self, row: int) -> None:
        """Drop the hidden states of the row, and reset its policy."""
        super().restart(row)
        self._runner.restart(row)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one tree per unfinished row, the root alone of rows without hidden states."""
        self._root_positions = {row: len(state.tokens[row]) - 1 for row in limits}
        depths = {
            row: min(limit, self.max_depth) if self._runner.knows(row) else 0
            for row, limit in limits.items()
        }
        self._depth = max(depths.values(), default=0)
        return super().draft(state, depths)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Store the hidden states of the root and the accepted nodes, and update the policy."""
        super().observe(verdict, output)
        kept_indices = output.committed_indices(verdict)
        spans = {
            row: (self._root_positions[row] - len(output.pending.get(row, [])), len(indices))
            for row, indices in kept_indices.items()
        }
        states = [output.hidden[layer] for layer in self.head.hidden_layers]
        all_indices = [index for indices in kept_indices.values() for index in indices]
        (index,) = send([torch.tensor(all_indices)], states[0].device)
        self._runner.learn(spans, [state[index.to(state.device)] for state in states])

    def scores(self, state: GenerationState, growth: Growth, probs: Tensor) -> Tensor | None:
        """Return those of the confidence head for the "head" policy."""
        if isinstance(self.policy, HeadPolicy):
            return self._proposals.confidence
        return super().scores(state, growth, probs)

    @use_packed_linears(rounded=True)
    def probabilities(self, state: GenerationState, growth: Growth) -> Tensor:
        """Return the (M, V) distributions of the head, after the call's processors."""
        if growth.depth == 0:
            roots = {row: state.tokens[row][-1] for row in growth.rows}
            self._proposals = self._runner.propose(roots, self._depth)
        logits = self._proposals.after(*growth.inputs_on(self._runner.device))
        return self.processed(state, growth, logits.to(state.device, torch.float32))
