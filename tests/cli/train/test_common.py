"""Output shared by the training commands: final results, tables, suggested commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_spec.cli.options import Placement
from hf_spec.cli.train.common import bench_command, conclude, next_command, show_table
from hf_spec.training.job import ResultTable, TrainingResult


def test_the_end_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    conclude(TrainingResult({"loss": 0.5, "agreement": 0.25}), "hf-spec bench m")
    assert capsys.readouterr().out.splitlines() == [
        "on the held-out answers: loss 0.500, agreement 0.250",
        "next: hf-spec bench m",
    ]


def test_a_table_instead_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    table = ResultTable("a title", ("rule", "F1"), [("disco", "0.50")])
    conclude(TrainingResult({"acceptance": 0.5}, table), "hf-spec bench m")
    page = capsys.readouterr().out
    assert "a title" in page
    assert "0.50" in page
    assert "on the held-out answers" not in page
    assert page.endswith("next: hf-spec bench m\n")


def test_one_process_of_several_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.PartialState.is_main_process", False)
    conclude(TrainingResult({"loss": 0.5}), "hf-spec bench m")
    assert capsys.readouterr().out == ""


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
