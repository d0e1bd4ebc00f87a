"""Drafts from heads that look at the target's hidden states once, and propose several levels.

What they propose for a level may depend on the tokens that are drafted before (`Proposals`). The
draft grows level by level like others: a chain, the likeliest paths, or a tree of ranks, drawn at
random or not, ended by any length policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_spec.backend.device import transfer
from hf_spec.backend.device.transfer import send
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import HeadPolicy, LengthPolicy
from hf_spec.drafting.level_drafter import Graphs, LevelConfig, LevelDrafter, Owners
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.fast.packed_linear import use_packed_linears
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput


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


class ProposalRunner(Protocol):
    """Runs a head, with whatever it keeps of each row.

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


class ProposalHead(Protocol):
    """A head as its drafter sees it.

    Attributes:
        hidden_layers: indices of the hidden states that it reads.
        num_levels: most tokens that it proposes in a row.
    """

    hidden_layers: tuple[int, ...]
    num_levels: int

    @property
    def timing_key(self) -> Hashable:
        """What measured times belong to."""

    def num_forwards(self, depth: int) -> int:
        """Passes that a draft of so many levels takes."""


class ProposalDrafter(LevelDrafter):
    """Grows a chain or a tree per row from what a head proposes.

    `make_runner` returns what runs the head for the rows of a generation.
    """

    # From `start` on.
    _runner: ProposalRunner
    _proposals: Proposals
    _places: dict[tuple[int, int], int]

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
            "the head needs the target's hidden states, which assisted decoding does not hand on; "
            f"use spec_strategy={config.strategy!r}"
        )
        self._roots: dict[int, int] = {}

    @property
    def timing_key(self) -> Hashable:
        """The head."""
        return self.head.timing_key

    def num_forwards(self, depth: int) -> int:
        """See `ProposalHead`."""
        return self.head.num_forwards(depth)

    def start(self, state: GenerationState) -> None:
        """Rows of which nothing is known."""
        super().start(state)
        self._runner = self._make_runner(state)

    def restart(self, row: int) -> None:
        """A row of which nothing is known."""
        super().restart(row)
        self._runner.restart(row)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, the root alone where no state is known yet."""
        self._roots = {row: len(state.tokens[row]) - 1 for row in limits}
        known = {
            row: min(limit, self.max_depth) if self._runner.knows(row) else 0
            for row, limit in limits.items()
        }
        self._depth = max(known.values(), default=0)
        return super().draft(state, known)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the hidden states of the root and of what was accepted; tell the policy."""
        super().observe(verdict, output)
        kept = output.kept_places(verdict)
        spans = {
            row: (self._roots[row] - len(output.pending.get(row, [])), len(mine))
            for row, mine in kept.items()
        }
        states = [output.hidden[layer] for layer in self.head.hidden_layers]
        places = torch.tensor([place for mine in kept.values() for place in mine])
        (index,) = send([places], states[0].device)
        self._runner.learn(spans, [found[index.to(found.device)] for found in states])

    def scores(self, probs: Tensor, positions: Sequence[int]) -> Tensor | None:
        """Those of the confidence head, for the policy that asks it."""
        if isinstance(self.policy, HeadPolicy):
            return self._proposals.confidence
        return super().scores(probs, positions)

    @use_packed_linears(rounded=True)
    def probabilities(self, state: GenerationState, graphs: Graphs, owners: Owners) -> Tensor:
        """(nodes, V) float32: what the head proposes after each (row, node), processed."""
        if owners[0][1] == 0:
            roots = {row: graph.tokens[0] for row, graph in graphs.items()}
            self._proposals = self._runner.propose(roots, self._depth)
            self._places = {(row, -1): place for place, row in enumerate(graphs)}
        tokens = [graphs[row].tokens[node] for row, node in owners]
        parents = [self._places[row, graphs[row].parents[node]] for row, node in owners]
        self._places = {owner: place for place, owner in enumerate(owners)}
        pair = [torch.tensor(part) for part in (tokens, parents)]
        logits = self._proposals.after(*send(pair, self._runner.device))
        logits = logits.to(state.device, torch.float32)
        return self.processed(state, graphs, owners, logits)

    @property
    def supports_device_growth(self) -> bool:
        """On a GPU."""
        return self._runner.device.type in transfer.ASYNCHRONOUS

    @use_packed_linears(rounded=True)
    def propose_on_device(self, state: GenerationState, growing: DeviceGrowth) -> Tensor:
        """(nodes, V) float32: what the head proposes after each node that runs next."""
        device, tokens = self._runner.device, growing.tokens
        if tokens is None:
            roots = {row: state.tokens[row][-1] for row in growing.rows}
            self._proposals = self._runner.propose(roots, self._depth)
            (tokens,) = send([torch.tensor(list(roots.values()))], device)
        logits = self._proposals.after(tokens.to(device), growing.above.to(device))
        return self.processed_unread(growing.owners, logits.to(state.device, torch.float32))
