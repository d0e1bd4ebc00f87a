"""Study of the two halves of EMS-SD: the tokens and KV slots of each, and the table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from examples.studies.ems_sd import halves
from hf_spec.engine.forward.kv_pool import KVPool
from tests.tiny_models import build


def test_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded inputs add seven tokens per row without a draft; an aligned KV cache has gaps."""
    keys: list[int] = []
    reserve = KVPool.reserve

    def watch(self: Any, length: int) -> None:
        keys.append(length)
        reserve(self, length)

    monkeypatch.setattr(KVPool, "reserve", watch)
    counts, longest = {}, {}
    for mode in halves.MODES:
        keys.clear()
        case = halves.Case(rows=4, gap=9, context=5)
        counts[mode], seconds = halves.verify(build("llama"), mode, case, time.perf_counter, 3)
        longest[mode] = keys[-1]
        assert len(seconds) == 3
    assert counts == {"padded": 32, "unpadded_kv": 32, "unpadded_input": 18, "unpadded": 18}
    # The row that is ahead does not draft; in an aligned cache the others draft from its position.
    assert longest["unpadded_input"] == longest["unpadded"] + 7


def test_saved_by_hand() -> None:
    records = [
        {"rows": 8, "gap": 64, "mode": mode, "tokens": 64, "seconds": seconds * factor}
        for factor in (1, 2, 4)
        for mode, seconds in zip(halves.MODES, (0.1, 0.06, 0.09, 0.05), strict=True)
    ]
    (row,) = halves.summary(records)
    assert row["ms"] == pytest.approx(
        {"padded": 200, "unpadded_input": 120, "unpadded_kv": 180, "unpadded": 100}
    )
    assert halves.table([row]).endswith("| 8 | 64 | 64 | 64 | 200 | 120 | 180 | 100 | 40% | 10% |")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder, out = tmp_path / "model", tmp_path / "halves.json"
    build("llama").save_pretrained(folder)
    command = f"--model {folder} --batch-sizes 2 --gaps 0 3 --context 6 --repeats 1 --out {out}"
    halves.main(command.split())
    content = json.loads(out.read_text())
    assert len(content["records"]) == 2 * len(halves.MODES)
    assert {row["gap"] for row in content["summary"]} == {0, 3}
    assert capsys.readouterr().out.count("\n") == 4
