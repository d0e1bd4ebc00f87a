"""Lengths of the oracle's drafts, and rules that predict where they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.disco.oracle_lengths import (
    cross_chosen,
    f1,
    lengths_table,
    main,
    measure,
    oracle_lengths,
    rules,
    rules_table,
    spread,
)
from hf_spec.adapters.folder import BaseModel
from hf_spec.evaluation.bench.contenders import oracle
from hf_spec.methods.disco.classifier import DiscoClassifier
from hf_spec.methods.disco.training import Observed
from hf_spec.training.responses import Response
from tests.tiny_models import draft_model


def learnable(count: int = 4) -> list[Observed]:
    """Return texts whose positions are accepted if their largest probability is above 0.7."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        features = torch.rand(40, 12, generator=generator)
        matched = features[:, 0] > 0.7
        found.append(Observed(f"p{index}", features, matched, matched.float()))
    return found


def test_lengths_by_hand() -> None:
    assert oracle_lengths([]) == []
    assert oracle_lengths([False]) == [0]
    assert oracle_lengths([True, True, False, False, True]) == [2, 0, 1]
    assert oracle_lengths([True, False]) == [1]


def test_lengths_are_those_of_the_benchmark_oracle(
    model: Any, observed_answer: tuple[Response, Observed]
) -> None:
    response, observed = observed_answer
    # The last token before the limit is always a bonus token.
    lengths = oracle_lengths(observed.matched.tolist()[:-1])
    stats = oracle(model, draft_model("llama")).run(torch.tensor([response.prompt]), 24).stats
    assert stats is not None
    assert sum(lengths) == stats.accepted_tokens > 0


def test_spread() -> None:
    found = spread([0, 0, 2, 6])
    assert found["histogram"] == {"0": 2, "2": 1, "6": 1}
    assert (found["rounds"], found["mean"], found["median"], found["longest"]) == (4, 2, 1, 6)
    assert found["standard_deviation"] == pytest.approx(6**0.5)


def test_f1_by_hand() -> None:
    true, false = True, False
    predicted = torch.tensor([true, true, false, false])
    assert f1(predicted, torch.tensor([true, false, true, false])) == pytest.approx(0.5)
    assert f1(torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)) == 0


def test_thresholds_come_from_the_other_half() -> None:
    scores = torch.tensor([0.9, 0.5, 0.1, 0.9, 0.5, 0.1])
    halves = torch.tensor([False] * 3 + [True] * 3)
    # In the first half only the highest score is accepted, in the second also the middle one.
    matched = torch.tensor([True, False, False, True, True, False])
    found = cross_chosen(scores, matched, halves)
    assert found["thresholds"] == [0.55, 0.15]
    # Each chosen threshold is wrong once: precision and recall are both 2 of 3.
    assert found["f1_accepted"] == pytest.approx(2 / 3)


def test_a_feature_that_decides_is_found() -> None:
    torch.manual_seed(0)
    classifier = DiscoClassifier(8).eval()
    found = rules(classifier, learnable(), [0.65])
    assert found["confidence"]["f1_accepted"] == 1
    assert found["confidence"]["thresholds"] == [0.7, 0.7]
    assert found["confidence"]["ranked_right"] == 1
    assert found["confidence"]["f1_accepted_by_threshold"]["0.4"] < 1
    assert "0.65" in found["classifier"]["f1_accepted_by_threshold"]
    assert found["static 10"]["f1_accepted"] < 1


def test_tables() -> None:
    observed = learnable()
    tasks = {one.id: "code" if n else "math" for n, one in enumerate(observed)}
    found = measure(observed, tasks, DiscoClassifier(8).eval(), [])
    assert found["positions"] == 160
    assert list(found["lengths"]) == ["all", "math", "code"]
    rounds = {task: row["rounds"] for task, row in found["lengths"].items()}
    assert rounds["all"] == rounds["math"] + rounds["code"]
    lines = lengths_table({"all": spread([0, 0, 1, 5, 12])}).splitlines()
    assert lines[2] == (
        "| all | 5 | 3.60 | 4.59 | 12 | 40.0% | 20.0% | 0.0% | 0.0% | 20.0% | 20.0% |"
    )
    assert rules_table(found["rules"]).splitlines()[3].startswith("| confidence | 1.000 | 1.000 |")


def test_command(model: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    classifier = tmp_path / "classifier"
    adapter = DiscoClassifier(8).to_adapter(
        BaseModel.of(model), draft=None, threshold=0.65, max_draft_tokens=5
    )
    adapter.save_pretrained(classifier)
    out = tmp_path / "lengths.json"
    command = ["--model", str(folder), "--assistant", str(folder), "--classifier", str(classifier)]
    main([*command, "--per-task", "1", "--new-tokens", "4", "--out", str(out)])
    assert capsys.readouterr().out.startswith("| task | rounds |")
    written = json.loads(out.read_text())
    assert written["prompts"] == 6
    # The model drafts for itself, so every draft is accepted up to the end.
    assert written["lengths"]["all"]["histogram"] == {"4": 6}
