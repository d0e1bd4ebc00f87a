"""Text tables: alignment, Markdown, and narrow terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from hf_spec.common.tables import Table

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


def drawn(table: Table, width: int) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=width).print(table.drawn("all"))
    return page.getvalue().splitlines()


NAME = "tree:max_nodes=24@a-draft-model-with-a-long-name"
HEAD = ["", *(f"figure {letter}" for letter in "abcdefghi")]
WIDE = Table(HEAD, [["plain", *["1.00 (0.90 - 1.10)"] * 9], [NAME, *["12.34"] * 9]])


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_column_is_lost_on_a_narrow_terminal(width: int) -> None:
    lines = drawn(WIDE, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert [word for word in words if word in set("abcdefghi")] == list("abcdefghi")
    assert words.count("12.34") == 9
    assert "\n".join(lines).count("1.00 (0.90 - 1.10)") == 9
    assert words.count("plain") > 1, "each part names its rows"


def test_texts_are_wrapped_before_a_table_is_divided() -> None:
    reason = "the two largest logits are equal within the error of the dtype"
    table = Table(["", "margin", "reason"], [["a", "0.1", reason]], wrapped=(2,))
    lines = drawn(table, 40)
    assert max(map(len, lines)) <= 40
    assert sum("margin" in line for line in lines) == 1
    assert set(reason.split()) <= set(" ".join(lines).split())
