"""Study of repeated requests: the requests, the records, and the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.studies.lookup_store import agent_turns
from examples.studies.lookup_store.agent_turns import LOOKUP, PLAIN, STORE, requests, summary, table
from hf_spec.common.prompts import Prompt, load_prompts
from tests.other_tokenizers import bpe, learned


def test_requests_differ_in_their_beginning() -> None:
    prompts = load_prompts(per_task=1)[:2]
    asked = requests(prompts, 3)
    assert [number for number, _ in asked] == [0, 0, 1, 1, 2, 2]
    texts = [prompt.turns[0] for _, prompt in asked]
    assert len(set(texts)) == 6
    assert all(text.endswith(prompts[0].turns[0]) for text in texts[::2])


def record(repetition: int, number: int, contender: str, seconds: float) -> dict[str, Any]:
    return {
        "repetition": repetition,
        "prompt": "a",
        "number": number,
        "contender": contender,
        "seconds": seconds,
        "new_tokens": 12,
        "target_forwards": 4 if contender == STORE else 6,
        "identical": True,
    }


def test_ratios_compare_within_a_repetition() -> None:
    records = [
        record(repetition, number, name, seconds * (1 + repetition) * (1 + number))
        for repetition in range(2)
        for number in range(2)
        for name, seconds in ((PLAIN, 6.0), (LOOKUP, 3.0), (STORE, 2.0))
    ]
    rows = summary(records)
    assert [(row["number"], row["contender"], row["ratio"]) for row in rows] == [
        (0, LOOKUP, 2.0),
        (0, STORE, 3.0),
        (1, LOOKUP, 2.0),
        (1, STORE, 3.0),
    ]
    assert rows[1]["tokens_per_forward"] == 3.0
    assert (rows[0]["identical"], rows[0]["outputs"]) == (2, 2)
    assert "| 2 | lookup, store | 3.00 | 3.00 | 3.00 | 2 / 2 |" in " ".join(table(rows).split())


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: learned("bpe"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: bpe())
    monkeypatch.setattr(
        agent_turns, "load_prompts", lambda per_task: load_prompts(per_task=per_task)[:1]
    )
    ids = bpe()("the quick brown", return_tensors="pt").input_ids
    monkeypatch.setattr(Prompt, "encode", lambda *_: ids)
    out = tmp_path / "records.json"
    arguments = ["--model", "x", "--times", "2", "--new-tokens", "6", "--repeats", "1"]
    agent_turns.main([*arguments, "--out", str(out)])
    assert "| lookup, store |" in " ".join(capsys.readouterr().out.split())
    records = json.loads(out.read_text())["records"]
    assert len(records) == 2 * 3
    assert all(one["identical"] for one in records)
