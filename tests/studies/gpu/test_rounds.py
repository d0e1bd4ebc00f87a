"""Round costs of models with random weights: the models, and consistent figures in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.gpu.rounds import CIRCLE, PROMPT, SMALL, WAYS, build, generate, main, prompt

CPU = torch.device("cpu")
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model() -> Any:
    return build(SMALL["small"], CPU, torch.float32)


def run(folder: Path, *options: str) -> Any:
    """Return the record that a dry run writes."""
    main([*options, "--dry-run", "--out", str(folder / "out.json")])
    return json.loads((folder / "out.json").read_text())


def check_rounds(found: dict[str, Any]) -> None:
    """Check the figures of one way on a CPU."""
    assert len(found["seconds"]) == 3
    assert len(found["seconds_of_warm_up"]) == 2
    low, high = found["ms_per_token_spread"]
    assert low <= found["ms_per_token"] <= high
    assert found["captures"] == found["replays"] == [0, 0, 0]
    assert found["refusal"] == "it is on cpu"
    assert found["waits_per_round"] == found["calls_per_round"] == {}
    assert found["kernels_per_round"] == 0
    assert found["peak_bytes"] > 0


def test_the_model_repeats_a_circle(model: Any) -> None:
    start = torch.tensor([[CIRCLE + 5]])
    ids = model.generate(start, max_new_tokens=2 * CIRCLE, do_sample=False)[0].tolist()
    assert ids == [CIRCLE + (5 + i) % CIRCLE for i in range(2 * CIRCLE + 1)]


def test_prompts_are_circles_of_their_own(model: Any) -> None:
    ids = prompt(3, CPU)
    assert ids.shape == (3, PROMPT)
    assert (ids // CIRCLE == torch.tensor([[1], [2], [3]])).all()
    following = model.generate(ids, max_new_tokens=1, do_sample=False)[:, PROMPT]
    assert torch.equal(following, ids[:, PROMPT - CIRCLE])
    _, stats = generate(model, ids[:1], 3 * CIRCLE, spec_strategy="lookup")
    assert stats is not None
    assert stats.acceptance == 1
    assert generate(model, ids, 1)[1] is None


def test_facts_and_the_fallback(tmp_path: Path) -> None:
    facts = run(tmp_path, "facts")
    assert facts["bytes_per_second"] > 0
    assert facts["seconds_per_launch"] > 0
    assert run(tmp_path, "fallback") == {"refusal": "it is on cpu", "reserved_bytes": []}


def test_some_ways(tmp_path: Path) -> None:
    small = run(tmp_path, "rounds", "--way", "none", "--way", "lookup")["small"]
    assert small["floor_ms"] > 0
    assert (small["compiled"]["layers"], small["compiled"]["refused"]) == (3, {})
    assert [length["tokens"] for length in small["prompts"]] == [16, 32]
    for length in small["prompts"]:
        assert {way: len(seconds) for way, seconds in length["seconds"].items()} == {
            "plain": 3,
            "none": 3,
        }
    found = small["batch 1"]
    assert list(found) == ["plain", "none", "lookup"]
    assert found["plain"]["ms_per_token"] > 0
    none, lookup = found["none"], found["lookup"]
    for way in (none, lookup):
        check_rounds(way)
    assert (none["rounds"], none["tau"], none["drafted_tokens"]) == (NEW_TOKENS, 0, 0)
    assert none["ms_per_round"] == pytest.approx(none["ms_per_token"])
    assert lookup["tau"] > 1
    assert lookup["rounds"] == 2, "the prefill, and one draft of 5 or more"
    assert lookup["ms_per_round"] == pytest.approx(7 * lookup["ms_per_token"])


@pytest.mark.full
def test_all_ways(tmp_path: Path) -> None:
    found = run(tmp_path, "rounds", "--batch-size", "1", "--batch-size", "2")["small"]
    for batch in ("batch 1", "batch 2"):
        assert list(found[batch]) == ["plain", *WAYS]
        for name in WAYS:
            check_rounds(found[batch][name])
        for name in ("lookup", "draft of 5", "tree"):
            assert found[batch][name]["rounds"] < NEW_TOKENS, name
        for name in ("falcon", "eagle"):
            assert found[batch][name]["drafted_tokens"] > 0, name


def test_an_unknown_way(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "rounds", "--way", "guess")
    assert "invalid choice: 'guess'" in capsys.readouterr().err
