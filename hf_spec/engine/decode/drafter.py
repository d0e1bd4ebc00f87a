"""The drafter interface: two verbs, `draft` and `observe`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection, Verifier
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.node_tokens import VirtualTokens
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.runner import ModelRunner


class Drafter(CandidateGenerator, ABC):
    """Proposes a draft tree per round and learns which nodes were accepted.

    A row of the state holds one sequence, or in continuous batching several in turn; `restart`
    announces a new one. State of a sequence is stored per row and dropped in `restart`; state of a
    generation is created in `start`.

    A drafter is also a `CandidateGenerator`: one that proposes chains works in the assisted
    decoding of transformers at batch size 1.

    Attributes:
        hidden_layers: indices of the target's hidden states that `observe` needs.
        samples: True if drafts are drawn at random; such trees have `draft_probs`.
        rule: the verifier of its trees, while it is active; None for the exact one.
        assisted_refusal_reason: why transformers' assisted decoding cannot use it; None if it can.
        virtual_tokens: embeddings of nodes with negative token ids; None if it proposes none.
        max_depth: depth of its deepest draft.
        depth_is_planned: True if the depth of a draft must be known before its first pass, since
            reading its tokens in between would make the host wait for the device.
        compile: overrides `hf_spec.compile` for the models of the call; None leaves it.
        counters: further counts by name, copied to `SpecStats.counters`.
    """

    hidden_layers: tuple[int, ...] = ()
    samples: bool = False
    rule: type[Verifier] | None = None
    assisted_refusal_reason: str | None = None
    virtual_tokens: VirtualTokens | None = None
    max_depth: int = sys.maxsize
    depth_is_planned: bool = False
    compile: bool | None = None
    counters: Mapping[str, int] = MappingProxyType({})
    _generation: GenerationState | None = None
    # Runs its own model or head: has the attribute `forwards` and the context manager `active()`.
    _runner: Any = None

    @property
    def forwards(self) -> int:
        """Forward passes of the drafter's own model so far."""
        return self._runner.forwards if self._runner is not None else 0

    def num_forwards(self, depth: int) -> int:
        """Return the forward passes of its model for a draft of `depth` levels, one per level."""
        return depth

    def relative_cost(self, target: PreTrainedModel) -> float | None:
        """Return the expected time of a forward pass of its model, in forward passes of `target`.

        Measured times replace it. Default: None, unknown.
        """
        return None

    def draft_kind(self, row: int) -> Hashable:
        """Return the kind of the last draft of `row`, if kinds differ in their acceptance rates.

        Default: None.
        """
        return None

    @property
    def exclusive_tree(self) -> bool:
        """True if its trees cannot be merged with others: virtual nodes compute the next draft."""
        return self.virtual_tokens is not None

    @property
    def timing_key(self) -> Hashable:
        """Key of its measured times: a part of it that outlives a generation, such as its model."""
        return id(self)

    def start(self, state: GenerationState) -> None:
        """Begin the generation of `state` and forget an earlier one. Default: nothing."""

    def restart(self, row: int) -> None:
        """Drop the state of `row`, where another sequence begins. Default: nothing."""

    def visit_runner(self, visit: Callable[[ModelRunner], object]) -> None:
        """Pass the runner of its own model to `visit`. Default: nothing.

        Called while active, before the first draft, if the target's prompt is more than tokens.
        `visit` runs a prompt with images, or stores the output of an encoder, if the model takes
        it.
        """

    @abstractmethod
    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Propose one tree per unfinished row; the root is the row's last token.

        The state must not be changed. `limits` maps each unfinished row to the maximum depth of its
        draft, 0 for the root only.
        """

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Read the accepted nodes and the target's hidden states. Default: nothing.

        Logits other than the best of a node may be -inf where all rows are greedy.
        """

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Prepare its own model for drafting, and restore it when the block ends.

        Entered at least once per generation, always with the same state; the first time calls
        `start`.
        """
        if self._generation is not state:
            self._generation = state
            self.start(state)
        with self._runner.active() if self._runner is not None else nullcontext():
            yield

    def make_verifier(self, processors: Sequence[Any], num_rows: int) -> Verifier:
        """Return the verifier of its trees, the exact one without a `rule`; called while active.

        Raises `UnsupportedError` if a rule cannot be combined with one of the user's processors.
        """
        exact = ResidualRejection if self.samples else NodeDraw
        return (self.rule or exact)(processors, num_rows)

    def get_candidates(  # type: ignore[override]
        self, input_ids: Tensor, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return (1, L + K) ids for transformers' assisted decoding: the prompt and a chain.

        The draft counts as deterministic. Raises `UnsupportedError` with `assisted_refusal_reason`.
        """
        if self.assisted_refusal_reason is not None:
            raise UnsupportedError(self.assisted_refusal_reason)
        state = self.__dict__.get("_assisted")
        if state is None or state.num_rows != input_ids.shape[0]:
            mask = torch.ones_like(input_ids)
            state = GenerationState.create(input_ids, mask, StopRules([], input_ids.shape[0]))
        else:
            for token in input_ids[0, len(state.tokens[0]) :].tolist():
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
        """Observe the first `num_matches` candidates as accepted by transformers."""
        tree, path = self._proposed
        self.observe(Verdict(tree, [path[:num_matches]], [None]), ForwardOutput(torch.empty(0)))


class NoDrafter(Drafter):
    """Drafter that proposes nothing: every round runs only the roots."""

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one root per unfinished row."""
        roots = {row: ([state.tokens[row][-1]], [-1]) for row in limits}
        return DraftTree.from_drafts(roots, state.num_rows)
