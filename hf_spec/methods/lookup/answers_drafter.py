"""Drafters that record the answers of a generation and copy from earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.lookup.answer_store import LONGEST_MATCH, LookupStore, find_draft


class AnswerRecorder(Drafter):
    """Drafter that adds the answer of every finished row to `store`.

    The end of the prompt is stored in front of the answer, so that the next answer to it matches
    from its first token on. Rows that an error or the caller interrupted are not stored.
    """

    store: LookupStore

    def start(self, state: GenerationState) -> None:
        """Begin with no recorded row."""
        super().start(state)
        self._recorded: set[int] = set()

    def restart(self, row: int) -> None:
        """Record `row` again when its new sequence ends."""
        super().restart(row)
        self._recorded.discard(row)

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """See `Drafter.active`; on exit, also record the rows that finished last."""
        with super().active(state):
            try:
                yield
            finally:
                self._record(state)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Record the rows that this round finished."""
        super().observe(verdict, output)
        assert self._generation is not None, "drafts are verified while active"
        self._record(self._generation)

    def _record(self, state: GenerationState) -> None:
        for row, finished in enumerate(state.finished):
            if finished and state.generated[row] and row not in self._recorded:
                self._recorded.add(row)
                self.store.add(state.tokens[row][-(state.generated[row] + LONGEST_MATCH) :])


class AnswersDrafter(AnswerRecorder):
    """Drafts from earlier answers only, not from the sequence itself."""

    def __init__(self, store: LookupStore, max_nodes: int, max_depth: int, min_match_length: int):
        self.store = store
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.min_match_length = min_match_length

    def num_forwards(self, depth: int) -> int:
        """Return 0: there is no model."""
        return 0

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return the best stored draft of every unfinished row, with probabilities."""
        drafts, probs = {}, []
        for row, limit in limits.items():
            tokens, depth = state.tokens[row], min(limit, self.max_depth)
            last = tokens[-LONGEST_MATCH:]
            draft = find_draft(self.store.text, last, self.max_nodes, depth, self.min_match_length)
            drafts[row] = [tokens[-1], *draft.tokens], [-1, *draft.parents]
            probs += [1.0, *draft.probs]
        return DraftTree.from_drafts(drafts, state.num_rows, node_probs=probs)
