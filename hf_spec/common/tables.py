"""Tables of strings: as Markdown, as plain text, or drawn in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Width to which cells may be wrapped.
NARROWEST = 12


@dataclass(frozen=True)
class Table:
    """Table whose first column names the rows; for `drawn`, cells may be `rich` texts.

    `wrapped` are the columns whose cells may be wrapped in a terminal, the widest first.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    wrapped: Sequence[int] = (0,)

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

    def drawn(self, title: str | None = None) -> DrawnTable:
        """Return a `rich` renderable of the table."""
        return DrawnTable(self, title)


@dataclass(frozen=True)
class DrawnTable:
    """Table in a terminal, aligned like `Table.text`, of which no column is lost.

    If it is too wide, first the cells of `Table.wrapped` columns are wrapped; if that is not
    enough, the last columns follow in further tables.
    """

    table: Table
    title: str | None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield one `rich` table or more."""
        columns = list(zip(self.table.head, *self.table.rows, strict=True))
        widths = [max(map(len, [*head.split(), *cells]), default=1) for head, *cells in columns]
        excess = _total(widths) - options.max_width
        narrow = list(widths)
        for column in self.table.wrapped:
            narrow[column] = max(min(widths[column], NARROWEST), widths[column] - max(excess, 0))
            excess -= widths[column] - narrow[column]
        if excess <= 0:
            widths = narrow
        else:
            for column in self.table.wrapped:
                widths[column] = min(widths[column], max(NARROWEST, options.max_width // 4))
        for number, part in enumerate(_parts(widths, options.max_width)):
            title = None if number else self.title
            yield _drawn(title, [columns[column] for column in part], [widths[c] for c in part])


def _total(widths: Sequence[int]) -> int:
    """Return the width of a table: two spaces between columns, one on each side."""
    return sum(widths) + 2 * len(widths)


def _parts(widths: Sequence[int], max_width: int) -> list[list[int]]:
    """Return the columns of each table; every table starts with the first column."""
    parts = [[0]]
    for column in range(1, len(widths)):
        part = [*parts[-1], column]
        if len(part) > 2 and _total([widths[c] for c in part]) > max_width:
            parts.append([0, column])
        else:
            parts[-1] = part
    return parts


def _drawn(title: str | None, columns: Sequence[Any], widths: Sequence[int]) -> Any:
    from rich import box, table
    from rich.text import Text

    drawn = table.Table(box=box.SIMPLE_HEAD, title=title, pad_edge=False, collapse_padding=True)
    drawn.title_justify, drawn.title_style = "left", "bold"
    for number, ((heading, *_), width) in enumerate(zip(columns, widths, strict=True)):
        lines = "\n".join(textwrap.wrap(heading, width))
        justify = "right" if number else "left"
        drawn.add_column(Text(lines), justify=justify, width=width, overflow="fold")  # type: ignore[arg-type]
    for row in zip(*(cells for _, *cells in columns), strict=True):
        drawn.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return drawn
