"""Training curves show the recorded evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.studies.falcon.training_curves import main, training_curves

RECORDS = {
    "about": "two trainings",
    "k = 1": {
        "evaluations": [
            {"step": 1, "answer_tokens": 500_000, "tau": 0.4},
            {"step": 2, "answer_tokens": 1_000_000, "tau": 0.5, "slot_2": 0.2},
        ]
    },
    "k = 2": {"minutes": 3, "evaluations": [{"step": 1, "answer_tokens": 250_000, "tau": 0.3}]},
}


def test_curves_are_the_evaluations() -> None:
    assert training_curves(RECORDS, "tau") == {
        "k = 1": ([0.5, 1.0], [0.4, 0.5]),
        "k = 2": ([0.25], [0.3]),
    }
    assert training_curves(RECORDS, "slot_2") == {"k = 1": ([1.0], [0.2])}


def test_the_command_draws_a_line_per_training(tmp_path: Path) -> None:
    records, plot = tmp_path / "records.json", tmp_path / "plot.svg"
    records.write_text(json.dumps(RECORDS))
    main([str(records), "--out", str(plot), "--title", "tau of one pass"])
    drawn = plot.read_text()
    for text in ("k = 1", "k = 2", "tau of one pass", "answer tokens seen, millions"):
        assert f"<!-- {text} -->" in drawn


def test_records_without_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.json"
    records.write_text(json.dumps({"about": "nothing"}))
    with pytest.raises(SystemExit):
        main([str(records), "--out", str(tmp_path / "plot.svg")])
    assert "there is no training with 'tau'" in capsys.readouterr().err


def test_some_trainings_of_several_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = {"k = 1, further": {"evaluations": [{"step": 3, "answer_tokens": 9, "tau": 0.6}]}}
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, record in zip(paths, (RECORDS, {"trainings": later}), strict=True):
        path.write_text(json.dumps(record))
    given = [*map(str, paths), "--out", str(tmp_path / "plot.svg"), "--only"]
    main([*given, "k = 2", "k = 1, further"])
    drawn = (tmp_path / "plot.svg").read_text()
    shown = [f"<!-- {name} -->" in drawn for name in ("k = 1", "k = 2", "k = 1, further")]
    assert shown == [False, True, True]
    with pytest.raises(SystemExit):
        main([*given, "k = 3"])
    said = capsys.readouterr().err
    assert "no record has a training 'k = 3', but k = 1, k = 2, k = 1, further" in said
    with pytest.raises(SystemExit):
        main([str(paths[0]), *given, "k = 1"])
    assert "first.json: an earlier record has a training 'k = 1', too" in capsys.readouterr().err


def test_evaluations_that_do_not_say_what_was_seen_are_left_out() -> None:
    assert training_curves({"old": {"evaluations": [{"step": 1, "tau": 0.2}]}}, "tau") == {}
