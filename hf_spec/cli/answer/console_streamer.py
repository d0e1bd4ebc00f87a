"""Streaming to the terminal with a separate style for accepted draft tokens.

The engine passes the tokens of a round together: accepted draft tokens, then the bonus token. Only
a round cut by a stop rule has no bonus token; its last token is then the end-of-sequence token,
which is not shown.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hf_spec.engine.decode.streaming import BatchTextStreamer

ACCEPTED_STYLE = "green"


class DraftedTextStreamer(BatchTextStreamer):
    """Streamer of one sequence that calls `on_piece(text, is_accepted_draft)`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_piece: Callable[[str, bool], None]):
        super().__init__(tokenizer, self._forward, skip_special_tokens=True)
        self._on_piece = on_piece
        self._drafted = False

    def put_row(self, row: int, token_ids: list[int]) -> None:
        """Receive the tokens of a round; all but the last are accepted draft tokens."""
        for drafted, part in ((True, token_ids[:-1]), (False, token_ids[-1:])):
            self._drafted = drafted
            if part:
                super().put_row(row, part)

    def _forward(self, row: int, text: str, ended: bool) -> None:
        if text:
            self._on_piece(text, self._drafted)


class ConsoleStreamer(DraftedTextStreamer):
    """Streamer that prints one sequence, with a `rich` style for accepted drafts, and stores it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, console: Console, accepted_style: str = ""
    ):
        super().__init__(tokenizer, self._print)
        self.console = console
        self.text = ""
        self._accepted_style = accepted_style

    def _print(self, text: str, drafted: bool) -> None:
        self.text += text
        shown = Text(printable(text), self._accepted_style if drafted else "")
        self.console.print(shown, end="", soft_wrap=True)


def printable(text: str) -> str:
    """Return `text` without control characters, which could control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
