"""Streams of several sequences: who gets which tokens, as soon as they are certain.

A streamer of transformers follows one sequence. A `BatchStreamer` is told with every block which
sequence it belongs to, and with a tokenizer a `BatchTextStreamer` turns each sequence into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_spec.common.errors import UnsupportedError

# What a tokenizer writes for bytes that are no whole character yet.
INCOMPLETE = "\ufffd"


class BatchStreamer(BaseStreamer):
    """Hands on the generated tokens of every sequence, block by block.

    For `generate(batch, spec_strategy=..., streamer=...)` and `generate_batch(...)`; prompts are
    not streamed. `on_tokens` gets the number of a sequence and its newest tokens, `on_end` that of
    one that has ended. Subclasses may override `put_row` and `end_row` instead.
    """

    def __init__(
        self,
        on_tokens: Callable[[int, list[int]], None],
        on_end: Callable[[int], None] = lambda row: None,
    ):
        self.on_tokens = on_tokens
        self.on_end = on_end

    def put_row(self, row: int, token_ids: list[int]) -> None:
        """Receive new tokens of one sequence: a row of a batch, or a place among the prompts."""
        self.on_tokens(row, token_ids)

    def end_row(self, row: int) -> None:
        """Learn that a sequence has ended; nothing more of it comes."""
        self.on_end(row)

    def put(self, value: torch.Tensor) -> None:
        """Pass over the prompts, which `generate()` puts first.

        Without a strategy it would put one token of all rows at a time, padding included: refused.
        """
        if value.ndim == 1:
            raise UnsupportedError(
                f"{type(self).__name__} follows speculative decoding; name a spec_strategy "
                "('none' drafts nothing), or use a streamer of transformers"
            )

    def end(self) -> None:
        """Learn that all sequences have ended."""


class BatchTextStreamer(BatchStreamer):
    """Decodes every sequence as it grows.

    The pieces of a sequence put together are what the tokenizer makes of all its tokens; a
    character of several tokens comes whole.

    `on_text` gets the number of a sequence, its newest text, and whether it has ended; the last
    call of a sequence may have no text. `decode_kwargs` are such as `skip_special_tokens=True`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[int, str, bool], None],
        **decode_kwargs: Any,
    ):
        super().__init__(self._decode, self._finish)
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.decode_kwargs = decode_kwargs
        self._texts: dict[int, _GrowingText] = {}

    def _decode(self, row: int, token_ids: list[int]) -> None:
        text = self._texts.setdefault(row, _GrowingText(self._text_of))
        if piece := text.add(token_ids):
            self.on_text(row, piece, False)

    def _finish(self, row: int) -> None:
        text = self._texts.pop(row, None)
        self.on_text(row, text.rest() if text else "", True)

    def _text_of(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, **self.decode_kwargs))


class _GrowingText:
    """A sequence of tokens whose text is read piece by piece.

    What a token looks like may depend on the one before it (a space between words, say), so new
    tokens are decoded together with those of the last piece.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._known: list[int] = []
        self._new: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is not whole."""
        self._new += token_ids
        return self._read(wait=True)

    def rest(self) -> str:
        """What was held back."""
        return self._read(wait=False)

    def _read(self, wait: bool) -> str:
        text = self._decode([*self._known, *self._new])
        if wait and text.endswith(INCOMPLETE):
            return ""
        piece = text[len(self._decode(self._known)) :]
        self._known, self._new = self._new or self._known, []
        return piece


class StreamFeed:
    """What a streamer was given so far: one of transformers, a `BatchStreamer`, or None."""

    def __init__(self, streamer: Any, num_rows: int):
        self.streamer = streamer
        self._names = list(range(num_rows))
        self._sent = [0] * num_rows
        self._ended = [False] * num_rows

    def begin(self, row: int, name: int) -> None:
        """Follow a new sequence in `row`, called `name`."""
        self._names[row] = name
        self._sent[row] = 0
        self._ended[row] = False

    def send(self, row: int, generated: Sequence[int], ended: bool) -> None:
        """Hand on what is new of all tokens that stay, and whether the row has ended."""
        if self.streamer is None or self._ended[row]:
            return
        block = list(generated[self._sent[row] :])
        self._sent[row] += len(block)
        self._ended[row] = ended
        if not isinstance(self.streamer, BatchStreamer):
            if block:
                self.streamer.put(torch.tensor(block))
            return
        if block:
            self.streamer.put_row(self._names[row], block)
        if ended:
            self.streamer.end_row(self._names[row])

    def end(self) -> None:
        """Close the streamer."""
        if self.streamer is not None:
            self.streamer.end()
