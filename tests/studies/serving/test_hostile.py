"""Hostile and disconnecting clients next to innocent ones, on a real server with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.conftest import folder  # noqa: F401 - a fixture

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

from examples.studies.serving import hostile
from examples.studies.serving.hostile import CANCELED, INNOCENT, POISON, POISONOUS, Asked


def test_a_tenth_is_poisonous_and_a_tenth_canceled() -> None:
    asked = [Asked(number, "a") for number in range(10 * len(POISON) * 2)]
    kinds = [one.kind for one in asked]
    assert kinds.count(INNOCENT) == 8 * kinds.count(POISONOUS) == 8 * kinds.count(CANCELED)
    poison = [json.dumps(one.body) for one in asked if one.kind == POISONOUS]
    assert len(set(poison)) == 2 * len(POISON), "every kind of poison, streamed and not"


def test_what_counts_as_it_should_be() -> None:
    def judged(kind: str, status: object, text: str = "") -> bool:
        return hostile.judge({"kind": kind, "status": status, "text": text}, "answer")

    assert judged(INNOCENT, 200, "answer")
    assert not judged(INNOCENT, 200, "ans")
    assert not judged(INNOCENT, 500, "answer")
    assert judged(CANCELED, "left")
    assert judged(POISONOUS, 400)
    assert judged(POISONOUS, "error in the stream")
    assert not judged(POISONOUS, 200)
    assert not judged(POISONOUS, 500)


@pytest.mark.full
def test_no_innocent_request_is_lost(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "hostile.json"
    options = {"--model": folder, "--clients": 8, "--requests": 25, "--turns": 2}
    options |= {"--log": tmp_path / "serve.log", "--out": out}
    hostile.main([str(part) for pair in options.items() for part in pair])
    found = json.loads(out.read_text())
    for turn in found["turns"]:
        assert turn["wrong"] == []
        assert turn["requests"] == turn["as_expected"]
    first, last = (turn["memory_mib"] for turn in found["turns"])
    assert last - first < 32
