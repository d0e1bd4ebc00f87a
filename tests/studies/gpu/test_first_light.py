"""First run on a GPU: failures and timeouts do not stop other parts; dry runs need no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.gpu import first_light
from examples.studies.gpu.first_light import Part, groups, main, run


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
    assert "== time limit" in log.read_text()


def test_the_status_of_every_part_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(first_light, "run", lambda part, _: {"status": 0, "seconds": 1.0})
    main(["--dry-run", "--out", str(tmp_path), "--group", "kernels", "--group", "correct"])
    names = ["facts", "fallback", "tests", "identity", "kernels"]
    assert capsys.readouterr().out == "".join(f"{name} 0 1.0\n" for name in names)
    assert list(json.loads((tmp_path / "parts.json").read_text())) == names
    with pytest.raises(SystemExit):
        main(["--dry-run", "--out", str(tmp_path), "--group", "all"])
    assert "invalid choice: 'all'" in capsys.readouterr().err


@pytest.mark.parametrize("dry", [True, False])
def test_a_group_takes_ten_minutes(tmp_path: Path, dry: bool) -> None:
    planned = groups(tmp_path, dry)
    assert list(planned) == ["correct", "rounds", "kernels"]
    for parts in planned.values():
        assert sum(part.seconds for part in parts) < 600


def test_commands_name_the_device(tmp_path: Path) -> None:
    for dry, device in ((True, "cpu"), (False, "cuda")):
        parts = {part.name: part for group in groups(tmp_path, dry).values() for part in group}
        assert dict(parts["identity"].environment)["HF_SPEC_TEST_DEVICE"] == device
        assert device in parts["kernels"].command
        assert ("--dry-run" in parts["rounds"].command) == dry
        assert ("--collect-only" in parts["tests"].command) == dry


def test_identity_files_exist() -> None:
    root = Path(__file__).parents[3]
    assert all((root / name).is_file() for name in first_light.IDENTITY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error without a GPU")
def test_without_a_gpu(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "no GPU found; --dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    main(["--dry-run", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "parts.json").read_text())
    assert list(found) == ["facts", "fallback", "tests", "identity", "rounds", "kernels"]
    assert {part["status"] for part in found.values()} == {0}, (tmp_path / "log.txt").read_text()
