"""What the commands share: the end of a training, and the files of its answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_spec.cli.options import Placement
from hf_spec.cli.train.common import (
    bench_command,
    conclude,
    known_answers,
    next_command,
    show_table,
)
from hf_spec.training.responses import Response
from tests.cli.train.cli_files import save_responses


def test_the_end_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    conclude({"loss": 0.5, "agreement": 0.25}, "hf-spec bench m")
    assert capsys.readouterr().out.splitlines() == [
        "on the answers held back: loss 0.500, agreement 0.250",
        "next: hf-spec bench m",
    ]


def test_one_process_of_several_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.PartialState.is_main_process", False)
    conclude({"loss": 0.5}, "hf-spec bench m")
    assert capsys.readouterr().out == ""


def test_folders_beside_the_files_or_in_one(tmp_path: Path) -> None:
    files = [save_responses(tmp_path / "a.jsonl"), save_responses(tmp_path / "b.jsonl")]

    def named(answers: list[Response], own: Path) -> list[str]:
        return [f"{own.relative_to(tmp_path)} {len(answers)}"]

    assert known_answers(files, None, "teacher", named) == ["a.teacher 8", "b.teacher 8"]
    assert known_answers(files, tmp_path / "all", "teacher", named) == ["all/a 8", "all/b 8"]


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("a title", ("", "tau"), [("one", "1.5"), ("two", "2.5")])
    page = capsys.readouterr().out
    for text in ("a title", "tau", "one", "2.5"):
        assert text in page


def test_words_are_quoted() -> None:
    line = next_command("train", "falcon", "--out", Path("my heads/a"), placement=Placement())
    assert line == "hf-spec train falcon --out 'my heads/a'"


def test_dtype_and_device_go_along() -> None:
    line = bench_command("org/model", "falcon@head", Placement("bfloat16", "cuda:1"))
    assert line == (
        "hf-spec bench org/model --strategy falcon@head --dtype bfloat16 --device cuda:1"
    )
    assert bench_command("m", "none", Placement()) == "hf-spec bench m --strategy none"
