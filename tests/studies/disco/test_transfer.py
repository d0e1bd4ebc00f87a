"""Classifiers trained on one task are evaluated on another in simulated rounds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.disco.transfer import (
    Counts,
    Rule,
    best_rule,
    judge,
    main,
    oracles,
    parts,
    read_prompts,
    simulate,
    table,
)
from hf_spec import DraftConfig
from hf_spec.evaluation.bench.contenders import strategy
from hf_spec.methods.disco.settings import DiscoTrainSettings
from hf_spec.methods.disco.training import Observed
from hf_spec.training.responses import Response
from tests.studies.disco.test_oracle_lengths import learnable
from tests.tiny_models import draft_model

TRUE, FALSE = True, False


def test_rounds_by_hand() -> None:
    matched = [TRUE, TRUE, FALSE, TRUE, TRUE]
    always, never = [TRUE] * 5, [FALSE] * 5
    # Two accepted and a bonus token; then one accepted and a bonus token.
    assert simulate(matched, always, 3) == Counts(2, 3 + 1, 5)
    assert simulate(matched, always, 1) == Counts(3, 1 + 1 + 1, 5)
    # A draft ends after the first token below the threshold.
    assert simulate(matched, never, 3) == simulate(matched, always, 1)
    assert Counts(2, 3, 6).speed(1 / 3) == pytest.approx(2)


def test_rounds_are_those_of_generate(
    model: Any, observed_answer: tuple[Response, Observed]
) -> None:
    response, observed = observed_answer
    matched = observed.matched.tolist()
    for length in (1, 3):
        config = DraftConfig(max_draft_tokens=length, length_policy="static")
        contender = strategy(model, config, draft_model("llama"))
        stats = contender.run(torch.tensor([response.prompt]), 24).stats
        assert stats is not None
        counts = simulate(matched, [TRUE] * len(matched), length)
        # The engine's prefill yields the first token without a draft.
        assert abs(counts.rounds - stats.rounds) <= 1
        assert abs(counts.drafted - stats.drafted_tokens) <= length


def test_the_best_rule_and_the_parts() -> None:
    observed = learnable(10)
    confidence = [one.features[:, 0] for one in observed]
    rules = [Rule(0.0, 20), Rule(0.7, 5), Rule(2.0, 5)]
    assert best_rule(observed, confidence, rules, 0.5) in rules[1:]
    training, choosing, judging = parts(observed, 0)
    assert (len(training), len(choosing), len(judging)) == (7, 1, 2)
    assert {o.id for o in observed} == {o.id for o in [*training, *choosing, *judging]}


def test_judging_and_the_table() -> None:
    observed = learnable(20)
    divided = parts(observed, 0)
    sets = {"a": divided[2], "b": learnable(3)}
    rows = judge("a", divided, sets, DiscoTrainSettings(learning_rate=0.02), 0.2)
    assert [(row["judged"], row["rule"]) for row in rows[:3]] == [
        ("a", "classifier"),
        ("b", "classifier"),
        ("a", "confidence"),
    ]
    assert rows[0]["ranked_right"] > 0.9
    best = {row["judged"]: row["speed"] for row in oracles(sets, 0.2)}
    assert all(row["speed"] <= best[row["judged"]] for row in rows)
    lines = table([*oracles(sets, 0.2), *rows]).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["a"] * 4 + ["b"] * 4
    assert "| oracle | - | - | - | - | - |" in lines[0]


def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "turns": ["a b " * (n + 1)]} for n in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--model", str(folder), "--assistant", str(folder), "--new-tokens", "6"]
    command += ["--train", f"own={prompts}", "--judge", "other=qa", "--num-prompts", "8"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "record.json")]
    main(command)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["prompts"] == {"own": 2, "other": 8}
    assert len(record["rows"]) == 2 + 2 * 3
    first = capsys.readouterr().out
    assert "more answers" in first
    # The second run reads the stored responses.
    main(command)
    again = capsys.readouterr().out
    assert again == first[first.index("| judged on") :]


def test_problems_of_human_eval_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number in range(2):
            file.write(json.dumps({"task_id": f"T/{number}", "prompt": "def f():"}) + "\n")
    (prompt,) = read_prompts(str(path), 1)
    assert (prompt.id, prompt.task) == ("T/0", "code")
    assert prompt.turns[0].endswith("def f():```")
    assert len(read_prompts("qa", 3)) == 3


def test_observed_without_matches_have_a_speed() -> None:
    none = Observed("x", torch.rand(4, 12), torch.zeros(4, dtype=torch.bool), torch.zeros(4))
    (row,) = oracles({"x": [none]}, 0.5)
    assert row["speed"] == 1
