"""Step cost study of compiled layers: every variant is timed and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.studies.compiled_layers.step_cost import COUNTS, main
from tests.compiler import needs_compiler


@needs_compiler
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "cost.json"
    given = ["--model", str(folder), "--context", "20", "--repeats", "1", "--out", str(out)]
    main(given)
    assert "| nodes | 1 | 4 | 16 |" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["compile"]["layers"] > 0
    assert list(written["seconds"]) == ["products", "transformers", "packed", "compiled"]
    for by_count in written["seconds"].values():
        assert by_count.keys() == {str(count) for count in COUNTS}
        assert all(min(seconds) > 0 for seconds in by_count.values())
