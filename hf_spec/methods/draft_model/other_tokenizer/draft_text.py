"""A sequence of the target's tokens as the draft model's, kept up to date as it grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hf_spec.methods.draft_model.other_tokenizer.text_tokens import (
    BROKEN,
    CONTEXT_TOKENS,
    Piece,
    context_start,
)
from hf_spec.methods.draft_model.other_tokenizer.token_map import TokenPair

# Characters at the end of a text whose tokens may change when it goes on.
UNSETTLED = 64
# Tokens that wait for the rest of a character. It has four bytes at most, but some tokens end in
# the middle of one and begin in the middle of another.
MOST_WAITING = 16


class DraftText:
    """The text of one row.

    Special tokens are taken over by name and split the text into runs, of which the newest grows.
    Only the end of it is encoded again.

    Attributes:
        text: of the newest run.
        unfinished: newest tokens of the target that are no whole character yet; neither `text` nor
            `ids` has them.
    """

    def __init__(self, pair: TokenPair):
        self._pair = pair
        self._read = 0
        self._settled = list(pair.draft.opening)
        self._begin_run()

    @property
    def ids(self) -> list[int]:
        """The draft model's tokens of all that was read."""
        return self._settled + [piece.token for piece in self._pieces]

    @property
    def newest(self) -> list[int]:
        """The last few of the newest run, after which others are decoded."""
        return [piece.token for piece in self._pieces[-CONTEXT_TOKENS:]]

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Take in what is new of a row's `tokens`; the draft model's tokens of all of them."""
        special = self._pair.target.special
        start = self._read
        for place in range(start, len(tokens)):
            if tokens[place] in special:
                self._extend(tokens[start:place])
                self._end_run(tokens[place])
                start = place + 1
        self._extend(tokens[start:])
        self._read = len(tokens)
        return self.ids

    def _begin_run(self) -> None:
        self.text = ""
        self.unfinished: list[int] = []
        self._recent: list[int] = []
        self._pieces: list[Piece] = []

    def _end_run(self, special: int) -> None:
        self._settled = self.ids
        ours = self._pair.special.get(special)
        # The draft model's text has been opened by its own tokenizer.
        opened = self._settled == self._pair.draft.opening and ours in self._settled
        if ours is not None and not opened:
            self._settled.append(ours)
        self._begin_run()

    def _extend(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        target = self._pair.target
        waiting = [*self.unfinished, *tokens]
        text = target.go_on(self._recent, waiting)
        whole = len(waiting)
        while text.endswith(BROKEN) and whole and len(waiting) - whole < MOST_WAITING:
            whole -= 1
            text = target.go_on(self._recent, waiting[:whole])
        if text.endswith(BROKEN):
            # These bytes are no character.
            whole, text = len(waiting), target.go_on(self._recent, waiting)
        self.unfinished = waiting[whole:]
        self._recent = [*self._recent, *waiting[:whole]][-CONTEXT_TOKENS:]
        if text:
            settled = len(self.text) - UNSETTLED
            self.text += text
            self._encode(settled)

    def _encode(self, settled: int) -> None:
        """Encode the text again from where it may have changed, after so many characters."""
        kept = bisect_right(self._pieces, settled, key=_end)
        border = self._pieces[kept - 1].end if kept else 0
        start = context_start(self.text, border)
        pieces = self._pair.draft.encode(self.text[start:])
        new = [Piece(p.token, p.start + start, p.end + start) for p in pieces]
        # By the ends: some tokenizers leave spaces out of what a token stands for.
        self._pieces[kept:] = [piece for piece in new if not kept or piece.end > border]


def _end(piece: Piece) -> int:
    return piece.end
