"""Streaming of one or several sequences: tokens are passed on as soon as they are certain.

A streamer of transformers follows one sequence. A `BatchStreamer` receives every block of tokens
with the index of its sequence, and a `BatchTextStreamer` decodes each sequence to text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_spec.common.errors import UnsupportedError

# Replacement character, which tokenizers return for the bytes of an incomplete character.
INCOMPLETE = "\ufffd"


class BatchStreamer(BaseStreamer):
    """Receives the generated tokens of every sequence in blocks.

    For `generate(batch, spec_strategy=..., streamer=...)` and `generate_batch(...)`; prompts are
    not streamed. `on_tokens` is called with the index of a sequence and its newest tokens, `on_end`
    with that of a sequence that has ended. Subclasses may override `put_row` and `end_row` instead.
    """

    def __init__(
        self,
        on_tokens: Callable[[int, list[int]], None],
        on_end: Callable[[int], None] = lambda row: None,
    ):
        self.on_tokens = on_tokens
        self.on_end = on_end

    def put_row(self, row: int, token_ids: list[int]) -> None:
        """Receive new tokens of a sequence: a row of a batch, or an index into the prompts."""
        self.on_tokens(row, token_ids)

    def end_row(self, row: int) -> None:
        """Receive the end of a sequence, after its last tokens."""
        self.on_end(row)

    def put(self, value: torch.Tensor) -> None:
        """Ignore the prompts, which `generate()` puts first.

        Raises:
            UnsupportedError: there is no strategy, so `generate()` puts one token of all rows at a
                time, padding included.
        """
        if value.ndim == 1:
            raise UnsupportedError(
                f"{type(self).__name__} needs a spec_strategy ('none' drafts nothing); without one "
                "use a streamer of transformers"
            )

    def end(self) -> None:
        """Receive the end of all sequences."""


class BatchTextStreamer(BatchStreamer):
    """Decodes every sequence as it grows.

    The concatenated pieces of a sequence are its decoded tokens. A character of several tokens is
    passed on as a whole.

    `on_text` is called with the index of a sequence, its newest text and True if it has ended; the
    last text may be empty. `decode_kwargs` are arguments such as `skip_special_tokens=True`.
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
    """A sequence of tokens whose text is read in pieces.

    The text of a token may depend on the one before it (a space between words), so new tokens are
    decoded together with those of the last piece.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._last_piece: list[int] = []
        self._new: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete, empty while a character is incomplete."""
        self._new += token_ids
        return self._read(wait=True)

    def rest(self) -> str:
        """Return the text of tokens that `add` held back."""
        return self._read(wait=False)

    def _read(self, wait: bool) -> str:
        text = self._decode([*self._last_piece, *self._new])
        if wait and text.endswith(INCOMPLETE):
            return ""
        piece = text[len(self._decode(self._last_piece)) :]
        self._last_piece, self._new = self._new or self._last_piece, []
        return piece
