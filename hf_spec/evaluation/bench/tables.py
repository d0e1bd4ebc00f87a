"""Tables of strings: as Markdown, as plain text, or drawn in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Table whose first column names the rows; for `drawn`, cells may be `rich` texts."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, columns: Mapping[str, Callable[[Any], str]], items: Iterable[Any]) -> Table:
        """Return a table with one row per item; `columns` maps a heading to its cell function."""
        return cls(list(columns), [[cell(item) for cell in columns.values()] for item in items])

    def markdown(self) -> str:
        """Return a Markdown table."""
        lines = ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows)])

    def text(self) -> str:
        """Return aligned plain text, the first column to the left and the others to the right."""
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * width for width in widths]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in (self.head, rule, *self.rows)
        )

    def drawn(self, title: str | None = None) -> Any:
        """Return a `rich` table aligned like `text`, with headings wrapped to the cell width."""
        from rich import box, table
        from rich.text import Text

        drawn = table.Table(box=box.SIMPLE_HEAD, title=title, pad_edge=False, collapse_padding=True)
        drawn.title_justify, drawn.title_style = "left", "bold"
        for column, (heading, *cells) in enumerate(zip(self.head, *self.rows, strict=True)):
            width = max(map(len, [*heading.split(), *cells]), default=1)
            lines = "\n".join(textwrap.wrap(heading, width))
            drawn.add_column(Text(lines), justify="right" if column else "left", min_width=width)
        for row in self.rows:
            drawn.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return drawn
