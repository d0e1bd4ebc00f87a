"""Tables of texts: as Markdown for a page, and in columns of equal width for a pipe or a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head.

    Attributes:
        head: one heading per column; the first column names the row.
        rows: as many cells each.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

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
