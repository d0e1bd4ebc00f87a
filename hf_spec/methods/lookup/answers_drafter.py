"""Drafters that store the answers of their generations and copy from those of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.lookup.answer_store import LONGEST_MATCH, LookupStore, suggest


class KeepsAnswers(Drafter):
    """Puts the answer of every row into `store` when it has ended.

    With the end of its prompt, so that the next answer to it is found from its first token on. What
    an error or a caller cut short is no answer.
    """

    store: LookupStore

    def start(self, state: GenerationState) -> None:
        """No row has ended."""
        super().start(state)
        self._kept: set[int] = set()

    def restart(self, row: int) -> None:
        """Another answer begins."""
        super().restart(row)
        self._kept.discard(row)

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Also rows that ended last are stored."""
        with super().active(state):
            try:
                yield
            finally:
                self._keep(state)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Store what has ended with this round."""
        super().observe(verdict, output)
        assert self._generation is not None, "drafts are judged while active"
        self._keep(self._generation)

    def _keep(self, state: GenerationState) -> None:
        for row, ended in enumerate(state.finished):
            if ended and state.generated[row] and row not in self._kept:
                self._kept.add(row)
                self.store.add(state.tokens[row][-(state.generated[row] + LONGEST_MATCH) :])


class AnswersDrafter(KeepsAnswers):
    """Proposes what followed in earlier answers; says nothing of the text itself."""

    def __init__(self, store: LookupStore, max_nodes: int, max_depth: int, min_match_length: int):
        self.store = store
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.min_match_length = min_match_length

    def num_forwards(self, depth: int) -> int:
        """None."""
        return 0

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """The best suggestion for every unfinished row, with the probabilities by count."""
        drafts, probs = {}, []
        for row, limit in limits.items():
            tokens, depth = state.tokens[row], min(limit, self.max_depth)
            last = tokens[-LONGEST_MATCH:]
            found = suggest(self.store.text, last, self.max_nodes, depth, self.min_match_length)
            drafts[row] = [tokens[-1], *found.tokens], [-1, *found.parents]
            probs += [1.0, *found.probs]
        return DraftTree.from_drafts(drafts, state.num_rows, node_probs=probs)
