"""Both sampling rules run every prompt, and quality is compared with plain `generate()`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.lossless.sampling_rules import (
    PLAIN,
    gsd_methods,
    log_probability,
    main,
    sdsat_methods,
    summary,
    table,
    with_rules,
)
from hf_spec import GsdConfig
from tests.tiny_models import build

CODE = {"text": "Add.", "test_list": ["assert add(1, 2) == 3"]}


def test_methods_and_rules() -> None:
    methods = gsd_methods("draft", (0.1, 0.2), 50)
    assert [one.name for one in methods] == ["SSD", "TSD", "GSD"]
    shapes = [(one.config.children, one.config.merge_length) for one in methods]  # type: ignore[attr-defined]
    assert shapes == [(1, None), (4, None), (4, 1)]
    rules = with_rules(methods, 0.7)
    assert [rule for rule, _ in rules] == ["exact", "lossy"] * 3
    assert [one.config.lossy for _, one in rules] == [False, True] * 3  # type: ignore[attr-defined]
    assert [rule for rule, _ in with_rules(methods, 0)] == ["exact"] * 3
    chain, tree = sdsat_methods("adapter", [3], [5])
    assert (chain.name, tree.name) == ("chain 3", "tree 5")
    assert isinstance(methods[0].config, GsdConfig)


def test_log_probability() -> None:
    model = build("llama")
    ids = torch.tensor([[3, 4, 5]])
    log_probs = (model(torch.tensor([[3, 4, 5, 6, 7]])).logits[0] / 0.5).log_softmax(dim=-1)
    expected = float((log_probs[2, 6] + log_probs[3, 7]).detach() / 2)
    assert log_probability(model, ids, [6, 7], 0.5) == pytest.approx(expected, abs=1e-5)


def test_summary_and_table() -> None:
    common = {"temperature": 0.7, "seed": 0, "seconds": 2.0, "new_tokens": 10, "sent": 8}
    common |= {"target_forwards": 5, "counters": {"draft_nodes": 20}, "right": None}

    def records(question: str, gain: float, right: bool | None) -> list[dict[str, Any]]:
        of = {**common, "question": question, "accepted": 0, "rounds": 0, "right": right}
        of |= {"method": PLAIN, "rule": "", "log_probability": -1.0}
        mine = {**of, "method": "GSD", "rule": "lossy", "accepted": 6, "rounds": 4}
        return [of, {**mine, "seconds": 1.0, "log_probability": gain - 1.0}]

    _, row = summary([*records("a", 0.1, None), *records("b", 0.3, True)])
    assert (row["accepted"], row["tau"], row["drafted"]) == (0.6, 1.5, 5.0)
    assert row["speed"] == pytest.approx(2)
    assert row["gain"] == pytest.approx(0.2)
    assert row["gain_error"] == pytest.approx(0.1)
    cells = "| 0.7 | GSD | lossy | 60.0% | 1.50 | 5.0 | 2.00 | -0.800 | +0.200 (0.100) | 1 of 1 |"
    assert table([row]).splitlines()[2] == cells
    assert "speed" not in table([row], with_speed=False)


def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    code, out = tmp_path / "code.jsonl", tmp_path / "record.json"
    code.write_text(json.dumps(CODE) + "\n")
    command = ["--model", str(folder), "--gsd", str(folder), "--out", str(out), "--no-speed"]
    command += ["--per-task", "1", "--tasks", "qa", "--seeds", "1", "--new-tokens", "4"]
    command += ["--temperatures", "0", "0.7", "--thresholds", "0", "0", "--max-nodes", "6"]
    main(command)
    records = json.loads(out.read_text())["records"]
    # Greedy: plain and three methods. Sampled: plain and three methods with two rules.
    assert len(records) == 4 + 7
    assert all(record["right"] is None for record in records)
    greedy = {r["log_probability"] for r in records if not r["temperature"]}
    assert len(greedy) == 1
    main([*command, "--code", str(code)])
    more = json.loads(out.read_text())["records"]
    assert more[:11] == records
    assert {record["right"] for record in more[11:]} == {False}
    assert "| 0.7 | GSD | lossy |" in capsys.readouterr().out
