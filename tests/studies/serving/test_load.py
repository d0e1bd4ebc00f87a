"""Load on real servers with a tiny model: no request is lost or hangs, and outputs are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.conftest import folder  # noqa: F401 - a fixture

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

from examples.studies.serving import load
from examples.studies.serving.load import BATCHED, KINDS, OURS, PLAIN

# Maximum growth of a server's memory from the first to the last part, in MiB.
MARGIN = 32


def test_of_ten_requests_seven_are_answered() -> None:
    asked = load.requests(["a", "b"], 20)
    kinds = [one.kind for one in asked]
    assert {kind: kinds.count(kind) for kind in KINDS} == {
        load.WHOLE: 8,
        load.STREAM: 6,
        load.CANCELLED: 2,
        load.MALFORMED: 2,
        load.TOO_LONG: 2,
    }
    assert sum(len(part) for part in load.parts(asked, 3)) == 20


def test_what_counts_as_it_should_be() -> None:
    def judged(kind: str, status: object, text: str = "") -> bool:
        record = {"kind": kind, "status": status, "text": text}
        return load.judge(record, load.Asked(0, kind, "a"), "answer")

    assert judged(load.WHOLE, 200, "answer")
    assert not judged(load.WHOLE, 200, "ans")
    assert judged(load.CANCELLED, 200, "ans")
    assert judged(load.MALFORMED, 400)
    assert not judged(load.MALFORMED, 500)
    assert not judged(load.TOO_LONG, "APIConnectionError: gone")


# Four servers start one after another, which takes more than a minute.
@pytest.mark.slow
def test_the_servers_under_load(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "load.json"
    options = {"--model": folder, "--strategy": "lookup", "--requests": 40, "--streams": 32}
    options |= {"--parts": 2, "--beside": 20, "--logs": tmp_path, "--out": out}
    load.main([str(part) for pair in options.items() for part in pair])
    found = json.loads(out.read_text())
    for name in OURS:
        ours = found["servers"][name]
        assert ours["requests"] == ours["as_expected"] == 40
        before, first, last = found["memory_mib_before_and_after_each_part"][name]
        assert before < first
        assert last - first < MARGIN
    for name in (PLAIN, BATCHED):
        theirs = found["servers"][name]
        assert theirs["requests"] == 18, "no limit, so nothing beyond it"
        # All except the malformed requests, which get status 500 there.
        assert theirs["as_expected"] == 16
    metrics = found["metrics"]
    assert metrics['hf_spec_requests_total{outcome="failed"}'] == 0
    assert metrics['hf_spec_requests_total{outcome="answered"}'] >= 28
