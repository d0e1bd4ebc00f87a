"""HumanEval study: which programs pass, and resuming a record."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.studies.real_models.human_eval import encode, main
from examples.studies.sdsat.task_quality import passes, read

PROBLEMS = [
    {
        "task_id": f"Test/{number}",
        "prompt": 'import math\n\n\ndef area(r):\n    """Area of a circle."""\n',
        "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n",
        "entry_point": "area",
    }
    for number in range(3)
]
RIGHT = "def area(r):\n    return math.pi * r * r\n"


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in PROBLEMS)
    return path


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"Here it is:\n```python\n{RIGHT}```\nIt works.", True),
        (RIGHT, True),
        (RIGHT.replace("math.pi", "3"), False),
        ("def area(r):\n    exit()\n", False),
        ("I do not know.", False),
        # The function of the prompt alone returns None.
        ("", False),
    ],
)
def test_programs(answer: str, right: bool) -> None:
    assert passes(PROBLEMS[0], answer) == right


def test_files(problems: Path, tmp_path: Path) -> None:
    assert read(problems) == PROBLEMS
    plain = tmp_path / "problems.jsonl"
    plain.write_bytes(gzip.decompress(problems.read_bytes()))
    assert read(plain) == PROBLEMS


def test_answers_may_begin_after_the_copy(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole, begun = (encode(tokenizer, PROBLEMS[0], after_copy) for after_copy in (False, True))
    assert begun[:, : whole.shape[1]].equal(whole)
    assert begun.shape[1] > whole.shape[1]


@pytest.mark.full
def test_command(problems: Path, folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "record.json"
    command = ["--model", str(folder), "--problems", str(problems), "--out", str(out)]
    command += ["--strategy", "none", "--strategy", "lookup", "--new-tokens", "6"]
    main(command)
    written = json.loads(out.read_text())
    # The order is shuffled, with the same result in every run.
    assert [record["problem"] for record in written["records"]] == ["Test/0", "Test/2", "Test/1"]
    for record in written["records"]:
        assert set(record["results"]) == {"plain", "none", "lookup"}
        assert all(not result["differences"] for result in record["results"].values())
        assert all(result["equals_none"] for result in record["results"].values())
    table = capsys.readouterr().out
    assert "| lookup |" in table
    assert "0 of 3" in table
    # A second command measures only what the record lacks.
    written["records"] = written["records"][:2]
    first = written["records"][0]["results"]["none"]["seconds"]
    out.write_text(json.dumps(written))
    main(command)
    again = json.loads(out.read_text())["records"]
    assert len(again) == 3
    assert again[0]["results"]["none"]["seconds"] == first
    with pytest.raises(SystemExit, match="new_tokens"):
        main([*command, "--new-tokens", "7"])
