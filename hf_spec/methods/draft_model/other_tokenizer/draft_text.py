"""A target token sequence in the draft model's tokens, updated incrementally as it grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from hf_spec.methods.draft_model.other_tokenizer.tokenizers import (
    CONTEXT_TOKENS,
    REPLACEMENT,
    TokenizerPair,
    TokenSpan,
    context_start,
)

# Characters at the end of a text whose tokens may change when the text grows.
UNSTABLE_CHARACTERS = 64
# Most tokens that are held back until their character is complete. A character has at most four
# bytes, but some tokens end inside one and begin inside another.
MOST_INCOMPLETE = 16


class DraftText:
    """The text of one row.

    Special tokens are mapped by name and divide the text into segments. Only the end of the last
    segment is encoded again when it grows.

    Attributes:
        text: the last segment.
        incomplete: last target tokens that are not a whole character yet; they are neither in
            `text` nor in `ids`.
    """

    def __init__(self, pair: TokenizerPair):
        self._pair = pair
        self._num_read = 0
        # Draft model tokens of all earlier segments.
        self._finished_ids = list(pair.draft.prefix_ids)
        self._begin_segment()

    @property
    def ids(self) -> list[int]:
        """The draft model's tokens of the whole text."""
        return self._finished_ids + [span.token for span in self._spans]

    @property
    def context(self) -> list[int]:
        """The last tokens of the last segment, as context for decoding."""
        return [span.token for span in self._spans[-CONTEXT_TOKENS:]]

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Read the new part of a row's `tokens`; return the draft model's tokens of all of them."""
        special = self._pair.target.special_ids
        start = self._num_read
        for index in range(start, len(tokens)):
            if tokens[index] in special:
                self._extend(tokens[start:index])
                self._end_segment(tokens[index])
                start = index + 1
        self._extend(tokens[start:])
        self._num_read = len(tokens)
        return self.ids

    def _begin_segment(self) -> None:
        self.text = ""
        self.incomplete: list[int] = []
        self._recent: list[int] = []
        self._spans: list[TokenSpan] = []

    def _end_segment(self, special: int) -> None:
        self._finished_ids = self.ids
        draft_id = self._pair.special_ids.get(special)
        # The draft model's tokenizer has already added its own prefix.
        at_start = self._finished_ids == self._pair.draft.prefix_ids
        if draft_id is not None and not (at_start and draft_id in self._finished_ids):
            self._finished_ids.append(draft_id)
        self._begin_segment()

    def _extend(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        target = self._pair.target
        pending = [*self.incomplete, *tokens]
        text = target.decode_after(self._recent, pending)
        count = len(pending)
        while text.endswith(REPLACEMENT) and count and len(pending) - count < MOST_INCOMPLETE:
            count -= 1
            text = target.decode_after(self._recent, pending[:count])
        if text.endswith(REPLACEMENT):
            # These bytes are not a character.
            count, text = len(pending), target.decode_after(self._recent, pending)
        self.incomplete = pending[count:]
        self._recent = [*self._recent, *pending[:count]][-CONTEXT_TOKENS:]
        if text:
            stable_end = len(self.text) - UNSTABLE_CHARACTERS
            self.text += text
            self._encode(stable_end)

    def _encode(self, stable_end: int) -> None:
        num_stable = bisect_right(self._spans, stable_end, key=attrgetter("end"))
        border = self._spans[num_stable - 1].end if num_stable else 0
        start = context_start(self.text, border)
        spans = self._pair.draft.encode(self.text[start:])
        new = [TokenSpan(s.token, s.start + start, s.end + start) for s in spans]
        # Compare ends, because some tokenizers exclude spaces from the range of a token.
        self._spans[num_stable:] = [s for s in new if not num_stable or s.end > border]
