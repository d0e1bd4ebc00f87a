"""Tables of texts."""

from __future__ import annotations

from hf_spec.bench.tables import Table

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
