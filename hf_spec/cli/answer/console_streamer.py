"""Text on the terminal as it is generated, accepted draft tokens in a style of their own.

The engine hands on the tokens of a round together: accepted draft tokens, then the target's own.
Only a round that a stop rule cuts short lacks the latter; then the last token is the one that ends
the text, which is not shown, for drafts leave room for the target's token under a token limit.
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
    """Calls `on_piece` with the text of one sequence, and whether it was drafted and accepted."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_piece: Callable[[str, bool], None]):
        super().__init__(tokenizer, self._hand_on, skip_special_tokens=True)
        self._on_piece = on_piece
        self._drafted = False

    def put_row(self, row: int, token_ids: list[int]) -> None:
        """Take the tokens of a round: all but the last are accepted draft tokens."""
        for drafted, part in ((True, token_ids[:-1]), (False, token_ids[-1:])):
            self._drafted = drafted
            if part:
                super().put_row(row, part)

    def _hand_on(self, row: int, text: str, ended: bool) -> None:
        if text:
            self._on_piece(text, self._drafted)


class ConsoleStreamer(DraftedTextStreamer):
    """Prints the text of one sequence, accepted draft tokens in a style of rich, and keeps it."""

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
    """`text` without control characters, with which a model could command the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
