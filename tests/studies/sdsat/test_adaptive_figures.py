"""Figures of SDSAT over k, from handmade records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.sdsat.adaptive_figures import figures, main

ADAPTER = "sdsat-adapter"


def record(contender: str, rounds: str, verified: int, **figures: Any) -> dict[str, Any]:
    return {
        "contender": contender,
        "seconds": 2.0,
        "plain_seconds": 3.0,
        "new_tokens": 30,
        "target_forwards": 2 * verified,
        "stats": {
            "drafted_tokens": 50,
            "accepted_by_position": [8, 4],
            "counters": {"adaptive_nodes": 20, rounds: verified},
        },
        **figures,
    }


RECORDS = [
    record(f"sdsat:num_adaptive=2@{ADAPTER}", "verify_rounds", 10),
    record(f"sdsat:num_adaptive=2@{ADAPTER}", "verify_rounds", 10, seconds=4.0),
    record(f"sdsat:num_adaptive=5,fused=true@{ADAPTER}", "fused_rounds", 12),
    record(f"sdsat:num_adaptive=2,tree=[[0],[1]]@{ADAPTER}", "verify_rounds", 6),
    {"contender": "plain", "seconds": 3.0, "stats": None},
]


def test_sums_over_prompts_and_repetitions() -> None:
    found = figures(RECORDS)
    assert {loop: list(rows) for loop, rows in found.items()} == {
        "fused": [5],
        "two forwards": [2],
        "two forwards, tree": [2],
    }
    assert found["two forwards"][2] == pytest.approx(
        {
            "accept_rate": 24 / 100,
            "tau": 24 / 20,
            "loop_ms": 300.0,
            "tokens_per_second": 10.0,
            "tokens_per_forward": 60 / 40,
            "ratio": 1.0,
        }
    )
    assert found["fused"][5]["tau"] == 1.0


def test_command_draws_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"records": RECORDS}))
    main([str(path), "--out", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(capsys.readouterr().out)["fused"]["5"]["tau"] == 1.0
    path.write_text(json.dumps({"records": RECORDS[-1:]}))
    with pytest.raises(SystemExit):
        main([str(path), "--out", str(tmp_path / "none.png")])
