"""Step cost study: the table and the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.studies.full_table.step_cost import main, table
from hf_spec.evaluation.bench.profiling import NODE_COUNTS


def test_table() -> None:
    seconds = {
        "transformers": {1: [0.010, 0.020, 0.900], 2: [0.030]},
        "off": {1: [0.015], 2: [0.016]},
        "auto": {1: [0.005], 2: [0.010, 0.006]},
    }
    assert table(seconds).splitlines() == [
        "| nodes | 1 | 2 |",
        "|---|---|---|",
        "| transformers, ms | 20 | 30 |",
        "| off, ms | 15 | 16 |",
        "| auto, ms | 5 | 8 |",
        "| auto, relative to its own 1 node | 1.00 | 1.60 |",
        "| auto, relative to transformers' 1 token | 0.25 | 0.40 |",
    ]


def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "cost.json"
    main(["--model", str(folder), "--context", "70", "--repeats", "1", "--out", str(out)])
    assert capsys.readouterr().out.startswith("| nodes | 1 | 2 | 4 |")
    written = json.loads(out.read_text())
    assert written["context"] == 70
    assert written["seconds"]["auto"].keys() == {str(count) for count in NODE_COUNTS}
