"""Task quality: parsing and judging of responses, running programs, and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.sdsat import task_quality
from examples.studies.sdsat.sandbox import Limits
from examples.studies.sdsat.task_quality import (
    PROBLEMS,
    code_of,
    final_number,
    judged_code,
    judged_math,
    main,
    models,
    read,
    table,
)
from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.folder import SpecAdapter, save_adapter
from tests.tiny_models import build


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7, so #### 1,234", 1234.0),
        ("She has 5, and then 12 left.", 12.0),
        ("It is -2.5 degrees", -2.5),
        ("nothing", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_code_of() -> None:
    assert code_of("Here:\n```python\nx = 1\n```\nand more\n```\ny\n```") == "x = 1\n"
    assert code_of("```\nx = 1\n# cut off") == "x = 1\n# cut off"
    assert code_of("x = 1") == "x = 1"


def test_judged() -> None:
    problem = {"question": "?", "answer": "2 + 2 = 4\n#### 4"}
    assert judged_math(problem, "The answer is 4.")["right"]
    assert not judged_math(problem, "The answer is 5, not 4 or 6.")["right"]
    problem = {"text": "?", "test_list": ["assert double(2) == 4", "assert double(0) == 0"]}
    right = judged_code(problem, "```python\ndef double(x):\n    return x + x\n```", Limits())
    assert right["right"]
    wrong = judged_code(problem, "def double(x): return 4", Limits())
    assert (wrong["right"], wrong["reason"]) == (False, "error")


@pytest.mark.parametrize("name", ["math", "code"])
def test_the_problems_are_whole(name: str) -> None:
    problems = read(PROBLEMS / f"{name}.jsonl")
    assert len(problems) == 16
    for problem in problems:
        if name == "math":
            assert final_number(problem["answer"]) is not None
        else:
            assert len(problem["test_list"]) >= 3
            called = problem["test_list"][0].removeprefix("assert ").partition("(")[0]
            assert called in problem["text"]


def test_command(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    said = {"question": "It is 39.", "text": "def add_all(x): return sum(x)"}
    monkeypatch.setattr(
        task_quality,
        "answer",
        lambda model, tokenizer, prompt, new: said["text" if "Python" in prompt else "question"],
    )
    out = tmp_path / "quality.json"
    command = ["--model", str(folder), "--num-problems", "2", "--out", str(out)]
    main(command)
    rows = [f"| {folder.name} | 1 of 2 | 1 of 2 |"]
    assert capsys.readouterr().out.splitlines()[2:] == rows
    (records,) = json.loads(out.read_text())["results"].values()
    assert [one["right"] for one in records] == [True, False, True, False]
    # Recorded responses are not generated again; a new one would raise `KeyError`.
    said.clear()
    main([*command, "--tuned", str(folder)])
    assert capsys.readouterr().out.splitlines()[2:] == rows
    with pytest.raises(SystemExit, match="has answers of 256 tokens"):
        main([*command, "--new-tokens", "5"])


def test_a_model_answers(folder: Path, capsys: Any) -> None:
    main(["--model", str(folder), "--num-problems", "1", "--new-tokens", "3"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 0 of 1 | 0 of 1 |")


def test_adapters_that_change_no_answer_are_refused(folder: Path, tmp_path: Path) -> None:
    adapter = SpecAdapter("sdsat", BaseModel.of(build("llama")), {"mode": "gated"}, {})
    save_adapter(tmp_path / "gated", adapter)
    with pytest.raises(SystemExit, match="mode 'gated': its answers are those of the base"):
        list(models(str(folder), [str(tmp_path / "gated")], []))


def test_an_interrupted_model_continues(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out, human_eval = tmp_path / "quality.json", tmp_path / "human_eval.jsonl"
    problem = {"prompt": "def f():\n", "test": "def check(f):\n    assert f()", "entry_point": "f"}
    human_eval.write_text(json.dumps(problem) + "\n")
    command = ["--model", str(folder), "--num-problems", "1", "--new-tokens", "3"]
    command += ["--human-eval", str(human_eval), "--out", str(out)]
    main(command)
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 0 of 1 | 0 of 1 | 0 of 1 |")
    record = json.loads(out.read_text())
    (records,) = record["results"].values()
    before = [*records]
    records[0]["said"], records[1:] = "kept", []
    out.write_text(json.dumps(record))
    main(command)
    (records,) = json.loads(out.read_text())["results"].values()
    assert records[0]["said"] == "kept"
    assert records[1:] == before[1:]


def test_table() -> None:
    records = [{"kind": "math", "right": True}, {"kind": "code", "right": False}]
    assert table({"base": records}).splitlines()[2] == "| base | 1 of 1 | 0 of 1 |"
