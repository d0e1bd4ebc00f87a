"""Tables of texts: as Markdown for a page, in columns for a pipe or a log, drawn on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of cells, of which the first names the row; `drawn` takes texts of rich as well."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, columns: Mapping[str, Callable[[Any], str]], items: Iterable[Any]) -> Table:
        """One row per item; `columns` has by heading what makes the cell of an item."""
        return cls(list(columns), [[cell(item) for cell in columns.values()] for item in items])

    def markdown(self) -> str:
        """Lines of cells between bars."""
        lines = ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows)])

    def text(self) -> str:
        """Lines of equal length, the first column flush left and the others flush right."""
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * width for width in widths]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in (self.head, rule, *self.rows)
        )

    def drawn(self, title: str | None = None) -> Any:
        """A table of rich, aligned like `text`, with headings in lines as long as their cells."""
        from rich import box, table
        from rich.text import Text

        found = table.Table(box=box.SIMPLE_HEAD, title=title, pad_edge=False, collapse_padding=True)
        found.title_justify, found.title_style = "left", "bold"
        for place, (heading, *cells) in enumerate(zip(self.head, *self.rows, strict=True)):
            width = max(map(len, [*heading.split(), *cells]), default=1)
            lines = "\n".join(textwrap.wrap(heading, width))
            found.add_column(Text(lines), justify="right" if place else "left", min_width=width)
        for row in self.rows:
            found.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return found
