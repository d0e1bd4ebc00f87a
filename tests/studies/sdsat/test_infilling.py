"""Infilling study: masked lines, the order of their parts, and resuming a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from examples.studies.sdsat.infilling import Gap, arranged, gaps, main, table
from hf_spec.methods.sdsat.infilling import Infilling

CODE = "def f(x):\n    # square\n    y = x * x\n\n    return y\n"


def test_gaps_are_the_lines_with_code() -> None:
    found = list(gaps("f.py", "import math\n", CODE, 2))
    assert [gap.middle for gap in found] == ["def f(x):", "    y = x * x", "    return y"]
    assert found[1] == Gap(
        "f.py:3", "def f(x):\n    # square\n", "    y = x * x", "\n\n    return y"
    )
    assert found[0].before == "import math\n"
    # Around the correct line, the parts join to the original text.
    assert found[2].before.endswith("\n\n")
    assert found[2].after == ""


def test_both_orders(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    infilling = Infilling(tokenizer, 3, 4, 5)
    gap = Gap("f", "ba\n", "be", "\nbi")
    before, after = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("ba\n", "\nbi")
    )
    assert arranged(infilling, gap, "PSM").tolist() == [[3, *before, 4, *after, 5]]
    assert arranged(infilling, gap, "SPM").tolist() == [[3, 4, *after, 5, *before]]


def test_table() -> None:
    record = {"order": "SPM", "right": True, "target_forwards": 4, "accepted": 2}
    records = [record, {**record, "right": False}]
    assert table({"m": records}).splitlines()[2] == "| m | 0 of 0 | 1 of 2 (50.0%) | 0.50 |"


def test_a_command_continues(folder: Path, tmp_path: Path, capsys: Any) -> None:
    code, out = tmp_path / "f.py", tmp_path / "infilling.json"
    code.write_text(CODE)
    markers = list(AutoTokenizer.from_pretrained(folder).get_vocab())[:3]
    command = ["--model", str(folder), "--python", str(code), "--out", str(out)]
    main([*command, "--markers", *markers])
    first = json.loads(out.read_text())["records"]
    assert [(r["gap"], r["order"]) for r in first[:2]] == [("f.py:1", "PSM"), ("f.py:1", "SPM")]
    assert len(first) == 6
    assert "0 of 3 (0.0%)" in capsys.readouterr().out
    record = json.loads(out.read_text())
    record["records"] = first[:1]
    out.write_text(json.dumps(record))
    main([*command, "--markers", *markers])
    assert json.loads(out.read_text())["records"] == first
