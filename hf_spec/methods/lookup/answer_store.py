"""Earlier answers, and what followed in them where the text ended as it does now.

Of all places in a text that end in the same tokens as the current one, each says what may come
next; what several say counts accordingly. The shares along a path make a probability. Drafts grow
from the likeliest node to the next, as many as the match is long, and of all lengths of match the
one whose draft is expected to bring the most tokens is taken (SuffixDecoding: Oliaro et al. 2024,
arXiv 2411.04975, section 3).

A suffix tree would hold the same counts and take hundreds of bytes for a token of text. Scanning
65,536 tokens for the places takes some ten microseconds, a token four bytes, and the oldest answers
leave by cutting them off.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_spec.common.errors import OptionError

# Longest match, and what is kept of a prompt in front of its answer.
LONGEST_MATCH = 64
# Nodes of a draft per token of the match, and the probability below which none is proposed: alpha
# and what the released code calls min_token_prob.
NODES_PER_TOKEN = 1.0
MIN_PROBABILITY = 0.1
# What answers stored one after the other are held apart by; equal to no token.
BETWEEN = -1

MAX_TOKENS = 65_536

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class LookupStore:
    """Answers of earlier calls, from which `lookup` and `auto` copy.

    Any number of calls may use one at the same time, of any models that share a tokenizer. One that
    is full forgets the oldest.

    Args:
        max_tokens: how many tokens it holds, four bytes each.

    Raises:
        OptionError: if that is no whole number of at least 1.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS):
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise OptionError(f"max_tokens={max_tokens!r} must be a whole number of at least 1")
        self.max_tokens = max_tokens
        self._vocab_size: int | None = None
        self._lock = threading.Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self.text)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            # Never changed in place: readers need no lock.
            self.text: Tokens = np.zeros(0, dtype=np.int32)
            self._lengths: deque[int] = deque()

    def add(self, tokens: Sequence[int]) -> None:
        """Store an answer, of which the end is kept if it is longer than the store."""
        kept = [*tokens[-(self.max_tokens - 1) :], BETWEEN] if self.max_tokens > 1 else []
        if len(kept) < 2:
            return
        with self._lock:
            self._lengths.append(len(kept))
            surplus = len(self.text) + len(kept) - self.max_tokens
            first = 0
            while first < surplus:
                first += self._lengths.popleft()
            self.text = np.concatenate([self.text[first:], np.asarray(kept, dtype=np.int32)])

    def serve(self, vocab_size: int) -> None:
        """Refuse, by its size, a vocabulary other than that of what is stored (`OptionError`)."""
        with self._lock:
            if self._vocab_size is None or not len(self.text):
                self._vocab_size = vocab_size
            if self._vocab_size != vocab_size:
                raise OptionError(
                    f"the LookupStore holds answers in a vocabulary of {self._vocab_size} tokens, "
                    f"the model's has {vocab_size}; use a store per tokenizer, or clear() it"
                )


@dataclass(frozen=True)
class Suggestion:
    """A draft: `tokens`, `parents` and `probs` as of a `DraftTree`, but without the root.

    Parents are counted with the root as 0; each probability is that of the token after its parent.
    `score` is how many of the tokens are expected to be right.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    score: float = 0.0


NOTHING = Suggestion([], [], [])


def suggest(
    text: Tokens, last: Sequence[int], max_nodes: int, max_depth: int, min_match: int = 1
) -> Suggestion:
    """The best draft of what followed in `text`, whose newest tokens are `last`.

    `text` ends with `BETWEEN`. At most `max_nodes` nodes and `max_depth` levels.
    """
    best = NOTHING
    # Every place after which something follows.
    ends = np.flatnonzero(text[:-1] == last[-1]) + 1
    ends = ends[text[ends] != BETWEEN]
    for length in range(1, LONGEST_MATCH + 1):
        if not len(ends):
            break
        longer = ends[:0]
        if length < min(len(last), LONGEST_MATCH):
            # In front of the text there is its end, BETWEEN.
            longer = ends[text[ends - length - 1] == last[-length - 1]]
        # A longer match at the same places says the same and may say more of it.
        if length >= min_match and len(longer) < len(ends):
            room = min(max_nodes, int(NODES_PER_TOKEN * length))
            found = _grow(text, ends, room, max_depth)
            best = max(best, found, key=_score)
        ends = longer
    return best


def _score(suggestion: Suggestion) -> float:
    return suggestion.score


def _grow(text: Tokens, ends: Any, max_nodes: int, max_depth: int) -> Suggestion:
    """The likeliest nodes after the places `ends`, parents first."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    score = 0.0
    # (-reach, order, probability, token, parent, depth, places that go on like this)
    waiting: list[tuple[float, int, float, int, int, int, Any]] = []
    order = 0
    node, depth, reach, places = 0, 0, 1.0, ends
    while len(tokens) < max_nodes:
        if depth < max_depth:
            following = text[places]
            for token, count in Counter(following.tolist()).most_common():
                share = count / len(places)
                if token != BETWEEN and reach * share >= MIN_PROBABILITY:
                    order += 1
                    on = places[following == token] + 1
                    entry = (-reach * share, order, share, token, node, depth + 1, on)
                    heapq.heappush(waiting, entry)
        if not waiting:
            break
        below, _, share, token, parent, depth, places = heapq.heappop(waiting)
        reach = -below
        tokens.append(token)
        parents.append(parent)
        probs.append(share)
        score += reach
        node = len(tokens)
    return Suggestion(tokens, parents, probs, score)
