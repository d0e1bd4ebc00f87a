"""Tables of texts."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from hf_spec.evaluation.bench.tables import Table

TABLE = Table(["", "ratio", "identical"], [["plain", "1.00", "2 of 2"], ["a", "12.5", "-"]])


def test_columns_of_equal_width() -> None:
    assert TABLE.text().splitlines() == [
        "       ratio  identical",
        "-----  -----  ---------",
        "plain   1.00     2 of 2",
        "a       12.5          -",
    ]


def test_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "|  | ratio | identical |",
        "|---|---|---|",
        "| plain | 1.00 | 2 of 2 |",
        "| a | 12.5 | - |",
    ]


def test_drawn_on_a_narrow_terminal_headings_break_and_cells_do_not() -> None:
    rows = [["plain", "1.00 (0.90 - 1.10)", Text("2 of 2")], ["[a]", "-", "-"]]
    page = io.StringIO()
    table = Table(["", "ratio to plain, median (p20 - p80)", "identical outputs"], rows)
    Console(file=page, width=40).print(table.drawn("all"))
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    assert lines == [
        "all",
        "",
        "           ratio to plain,  identical",
        "        median (p20 - p80)    outputs",
        " ────────────────────────────────────",
        " plain  1.00 (0.90 - 1.10)     2 of 2",
        " [a]                     -          -",
        "",
    ]
