"""The contract of a drafter: whatever proposes tokens, in two verbs."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection, Verifier
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.runner import ModelRunner
from hf_spec.engine.forward.virtual_tokens import VirtualTokens


class DraftRunner(Protocol):
    """What runs a drafter's own model, and counts its forward passes."""

    forwards: int

    def active(self) -> AbstractContextManager[Any]:
        """Make the model ready; it is as it was found when the block ends."""


class Drafter(CandidateGenerator, ABC):
    """Proposes a draft tree per round and learns the outcome.

    A row of the state is one sequence from the beginning to the end, or one after another in
    continuous batching: `restart` says that a row has a new one. What a drafter keeps of a sequence
    it keeps by row and drops there; what it keeps of a generation it makes in `start`.

    It is also a `CandidateGenerator`, so a drafter that proposes chains works in the stock assisted
    decoding of transformers at batch size 1.

    Attributes:
        hidden_layers: indices of the target's hidden states that `observe` wants to see.
        samples: whether drafts are drawn at random; such trees carry `draft_probs`.
        rule: the verifier that judges its trees, while it is active; None for the exact one.
        assisted_refusal_reason: why it cannot serve transformers' assisted decoding; None if it
        can. virtual_tokens: what the nodes with negative token ids stand for; None if it sends
        none. max_depth: levels of its deepest draft. compile: overrides `hf_spec.compile` for the
        models of the call; None leaves it. counters: what the drafter counts beside that, by name;
        `SpecStats.counters` at the end.
    """

    hidden_layers: tuple[int, ...] = ()
    samples: bool = False
    rule: type[Verifier] | None = None
    assisted_refusal_reason: str | None = None
    virtual_tokens: VirtualTokens | None = None
    max_depth: int = sys.maxsize
    compile: bool | None = None
    counters: Mapping[str, int] = MappingProxyType({})
    _generation: GenerationState | None = None
    _runner: DraftRunner | None = None

    @property
    def forwards(self) -> int:
        """Forward passes of the drafter's own model so far."""
        return self._runner.forwards if self._runner is not None else 0

    def num_forwards(self, depth: int) -> int:
        """Forwards of its own that a draft of so many levels takes: one a level by default."""
        return depth

    @property
    def alone(self) -> bool:
        """Whether its trees cannot be joined with others': virtual nodes bring the next draft."""
        return self.virtual_tokens is not None

    @property
    def timing_key(self) -> Hashable:
        """What measured times belong to: what of it outlives a generation, such as its model."""
        return id(self)

    def start(self, state: GenerationState) -> None:
        """Begin the generation of `state` and forget an earlier one. Nothing by default."""

    def restart(self, row: int) -> None:
        """Forget what was kept of `row`: a new sequence begins there. Nothing by default."""

    def prefill(self, run: Callable[[ModelRunner], object]) -> None:
        """Let `run` give a model of its own a prompt that is more than tokens; nothing by default.

        Called while active, before the first draft, where the target's prompt is so: with images,
        for instance. `run` leaves models alone that know nothing of such prompts.
        """

    @abstractmethod
    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Propose one tree per unfinished row; the root is the row's last token.

        Args:
            state: the sequences; not changed.
            limits: unfinished row -> how many levels its draft may have, 0 for the root alone.
        """

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Learn which nodes were accepted, and the target's hidden states. Nothing by default."""

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Hold whatever drafting needs (its own model made ready), and let go of it.

        Entered once or more in a generation, always with the same state; the first time starts it.
        """
        if self._generation is not state:
            self._generation = state
            self.start(state)
        with self._runner.active() if self._runner is not None else nullcontext():
            yield

    def make_verifier(self, processors: Sequence[Any], num_rows: int) -> Verifier:
        """The rule that judges this drafter's trees; asked for while the drafter is active.

        Without a `rule` of its own it is an exact one. A rule may refuse a processor of the user
        that it would disturb.
        """
        exact = ResidualRejection if self.samples else NodeDraw
        return (self.rule or exact)(processors, num_rows)

    def get_candidates(  # type: ignore[override]
        self, input_ids: Tensor, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Serve transformers' assisted decoding: (1, L + K), the prompt and the drafted chain.

        The draft counts as deterministic. A drafter that needs what assisted decoding does not give
        is refused.
        """
        if self.assisted_refusal_reason is not None:
            raise UnsupportedError(self.assisted_refusal_reason)
        state = self.__dict__.get("_assisted")
        if state is None or state.num_rows != input_ids.shape[0]:
            mask = torch.ones_like(input_ids)
            state = GenerationState.create(input_ids, mask, StopRules([], input_ids.shape[0]))
        else:
            known = len(state.tokens[0])
            for token in input_ids[0, known:].tolist():
                state.append(0, token)
        self._assisted = state
        with self.active(state):
            tree = self.draft(state, state.draft_limits)
        path = [0]
        while children := tree.proposals(path[-1]):
            path.append(children[0])
        self._proposed = tree, path[1:]
        drafted = [tree.tokens[node] for node in path[1:]]
        return torch.cat([input_ids, input_ids.new_tensor([drafted])], dim=1), None

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Tell the drafter how many of its candidates transformers kept."""
        tree, path = self._proposed
        self.observe(Verdict(tree, [path[:num_matches]], [None]), ForwardOutput(torch.empty(0)))


class NoDrafter(Drafter):
    """Drafter that proposes nothing: every round runs the roots alone."""

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One root per unfinished row."""
        roots = {row: ([state.tokens[row][-1]], [-1]) for row in limits}
        return DraftTree.from_drafts(roots, state.num_rows)
