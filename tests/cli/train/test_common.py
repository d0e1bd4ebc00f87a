"""What the commands share: the end of a training, and the files of its answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_spec.cli.train.common import answer_files, conclude
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
    file = save_responses(tmp_path / "a.jsonl")
    [(answers, own)] = answer_files([file], None, "teacher")
    assert (len(answers), own) == (8, tmp_path / "a.teacher")
    [(_, own)] = answer_files([file], tmp_path / "all", "teacher")
    assert own == tmp_path / "all" / "a"
