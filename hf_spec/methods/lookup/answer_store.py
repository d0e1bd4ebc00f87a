"""Store of earlier answers, and drafters that record answers and copy from them (SuffixDecoding).

Every stored position whose preceding tokens equal the end of the current text votes for its next
token. The share of votes is the probability of a node after its parent. Drafts grow by the most
probable node, up to a size proportional to the match length; of all match lengths, the draft with
the most expected accepted tokens is used (Oliaro et al. 2024, arXiv 2411.04975, section 3).

The paper stores a suffix tree, which takes hundreds of bytes per token. This store is a flat array
of 4 bytes per token: scanning 65,536 tokens takes about ten microseconds, and old answers are
removed by slicing.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from hf_spec.common.errors import OptionError
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput

# Longest match, and number of prompt tokens that are stored in front of an answer.
LONGEST_MATCH = 64
# The paper's alpha (nodes of a draft per matched token), and the smallest path probability of a
# node, min_token_prob in the released code.
NODES_PER_TOKEN = 1.0
MIN_PROBABILITY = 0.1
# Separator after each stored answer; not a token id.
SEPARATOR = -1

DEFAULT_TOKENS = 65_536

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class LookupStore:
    """Answers of earlier calls, from which `lookup` and `auto` copy.

    Any number of concurrent calls may use it, with any models that share a tokenizer. When its
    `max_tokens` tokens, four bytes each, are full, the oldest answers are removed.
    """

    def __init__(self, max_tokens: int = DEFAULT_TOKENS):
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise OptionError(f"max_tokens={max_tokens!r} must be a whole number of at least 1")
        self.max_tokens = max_tokens
        self._vocab_size: int | None = None
        self._lock = threading.Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self.text)

    def clear(self) -> None:
        """Remove all answers."""
        with self._lock:
            # Never modified in place, so readers need no lock.
            self.text: Tokens = np.zeros(0, dtype=np.int32)

    def add(self, tokens: Sequence[int]) -> None:
        """Store an answer; if it is longer than the store, only its end."""
        entry = [*tokens[-(self.max_tokens - 1) :], SEPARATOR] if self.max_tokens > 1 else []
        if len(entry) < 2:
            return
        with self._lock:
            kept, surplus = self.text, len(self.text) + len(entry) - self.max_tokens
            if surplus > 0:
                ends = np.flatnonzero(kept == SEPARATOR) + 1
                kept = kept[ends[ends >= surplus][0] :]
            self.text = np.concatenate([kept, np.asarray(entry, dtype=np.int32)])

    def serve(self, vocab_size: int) -> None:
        """Use the store for a vocabulary of this size; `OptionError` if it holds one of another."""
        with self._lock:
            if self._vocab_size is None or not len(self.text):
                self._vocab_size = vocab_size
            if self._vocab_size != vocab_size:
                raise OptionError(
                    f"the LookupStore holds answers in a vocabulary of {self._vocab_size} tokens, "
                    f"but the model has {vocab_size}; use one store per tokenizer, or clear() it"
                )


@dataclass
class StoredDraft:
    """Draft from the store, without the root.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent, where 0 is the root and node i has index i + 1.
        probs: probability of each node after its parent.
        score: expected number of accepted tokens.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    score: float = 0.0


def find_draft(
    text: Tokens, last: Sequence[int], max_nodes: int, max_depth: int, min_match: int = 1
) -> StoredDraft:
    """Return the draft with the highest score over all match lengths; empty without a match.

    `text` are the stored tokens, ending with `SEPARATOR`; `last` are the last ones of the sequence.
    """
    best = StoredDraft([], [], [])
    # Positions after a match, at which another token is stored.
    positions = np.flatnonzero(text[:-1] == last[-1]) + 1
    positions = positions[text[positions] != SEPARATOR]
    for length in range(1, LONGEST_MATCH + 1):
        if not len(positions):
            break
        longer = positions[:0]
        if length < min(len(last), LONGEST_MATCH):
            # Index -1 is the last separator, which matches no token.
            longer = positions[text[positions - length - 1] == last[-length - 1]]
        # If every position also has the longer match, the longer match allows a larger draft.
        if length >= min_match and len(longer) < len(positions):
            size = min(max_nodes, int(NODES_PER_TOKEN * length))
            draft = _grow(text, positions, size, max_depth)
            best = max(best, draft, key=attrgetter("score"))
        positions = longer
    return best


def _grow(text: Tokens, positions: Any, max_nodes: int, max_depth: int) -> StoredDraft:
    """Return the most probable nodes of the continuations at `positions`, parents first."""
    draft = StoredDraft([], [], [])
    # Heap of (-reach, order, probability, token, parent, depth, positions after the token).
    candidates: list[tuple[float, int, float, int, int, int, Any]] = []
    order = 0
    node, depth, reach = 0, 0, 1.0
    while len(draft.tokens) < max_nodes:
        if depth < max_depth:
            following = text[positions]
            for token, count in Counter(following.tolist()).most_common():
                share = count / len(positions)
                if token != SEPARATOR and reach * share >= MIN_PROBABILITY:
                    order += 1
                    after = positions[following == token] + 1
                    entry = (-reach * share, order, share, token, node, depth + 1, after)
                    heapq.heappush(candidates, entry)
        if not candidates:
            break
        negative_reach, _, share, token, parent, depth, positions = heapq.heappop(candidates)
        reach = -negative_reach
        draft.tokens.append(token)
        draft.parents.append(parent)
        draft.probs.append(share)
        draft.score += reach
        node = len(draft.tokens)
    return draft


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
        """Record the rows that finished last on exit."""
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
        for row in range(state.num_rows):
            if state.is_complete(row) and state.generated[row] and row not in self._recorded:
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
