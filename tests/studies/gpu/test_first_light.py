"""The first minutes on a GPU: parts that fail or hang stop nothing, and a CPU can try them out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.gpu import first_light
from examples.studies.gpu.first_light import Part, main, parts, run


@pytest.mark.full
def test_a_part_that_fails_or_hangs(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    commands = {"right": "print('said')", "wrong": "exit(3)", "slow": "import time; time.sleep(60)"}
    found = {
        name: run(Part(name, 2, [sys.executable, "-c", code]), log)["status"]
        for name, code in commands.items()
    }
    assert found == {"right": 0, "wrong": 3, "slow": None}
    assert [line for line in log.read_text().splitlines() if not line.startswith("== ")] == ["said"]
    assert "== its time is over" in log.read_text()


def test_every_part_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(first_light, "run", lambda part, _: {"status": 0, "seconds": 1.0})
    main(["--dry-run", "--out", str(tmp_path), "--part", "tests", "--part", "facts"])
    assert capsys.readouterr().out == "facts 0 1.0\ntests 0 1.0\n"
    assert list(json.loads((tmp_path / "parts.json").read_text())) == ["facts", "tests"]
    with pytest.raises(SystemExit):
        main(["--dry-run", "--out", str(tmp_path), "--part", "all"])
    assert "--part all; choose facts, tests, fallback, rounds, folder" in capsys.readouterr().err


def test_with_a_checkpoint_no_other_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[str, Part] = {}
    monkeypatch.setattr(first_light, "run", lambda part, _: ran.setdefault(part.name, part) and {})
    main(["--dry-run", "--out", str(tmp_path), "--model", "mine"])
    assert list(ran) == ["facts", "tests", "fallback", "rounds", "bench", "kernels"]
    assert "mine" in ran["bench"].command


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "there is no GPU here; --dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    main(["--dry-run", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "parts.json").read_text())
    assert list(found) == [part.name for part in parts(tmp_path, tmp_path, True)]
    assert {part["status"] for part in found.values()} == {0}, (tmp_path / "log.txt").read_text()
