"""DISCO calibration: measurements, the selected options, and rejected inputs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from hf_spec import OptionError
from hf_spec.adapters.folder import load_adapter
from hf_spec.common.outputs import RowStats, SpecStats
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.evaluation.bench.calibrate.disco import (
    ForwardCounts,
    calibrate_disco,
    check_prompts,
    compare_by_forwards,
    fastest,
    seconds_at_median_cost,
    tabulate,
    validation_prompts,
)
from hf_spec.evaluation.bench.runner import Record
from hf_spec.evaluation.settings import CalibrationSettings
from tests.tiny_models import build, save_disco_adapter, tokenizer

SETTINGS = CalibrationSettings(
    thresholds=(0.3, 0.6),
    longest=(2, 4),
    static_lengths=(1, 3),
    reference=2,
    new_tokens=6,
    repeats=2,
)
PROMPTS = [Prompt(f"v{i}", "x", ("".join(words),)) for i, words in enumerate(["babebi", "cacece"])]


def words() -> Any:
    """Return the shared tokenizer, which splits texts into its two-letter words."""
    made = copy.deepcopy(tokenizer())
    made.backend_tokenizer.pre_tokenizer = Split(Regex(".."), "isolated")
    return made


def record(
    contender: str, prompt: str, repeat: int, seconds: float, tau: float = 1.0, **more: Any
) -> Record:
    fields: dict[str, Any] = {"task": "x", "plain_seconds": 8.0, "new_tokens": 4, "identical": True}
    stats = SpecStats([RowStats(100, 300, round(100 * tau), 200)])
    fields |= {"target_forwards": 2, "stats": stats, **more}
    return Record(prompt=prompt, contender=contender, repeat=repeat, seconds=seconds, **fields)


@pytest.mark.full
def test_the_best_pair_goes_into_the_adapter(tmp_path: Path) -> None:
    model, ticks = build("llama"), []
    save_disco_adapter(tmp_path, model, threshold=0.99, max_draft_tokens=99)
    before = load_adapter(tmp_path)
    made = calibrate_disco(
        model, words(), tmp_path, PROMPTS, SETTINGS, progress=lambda: ticks.append(1)
    )
    assert len(ticks) == SETTINGS.num_contenders * len(PROMPTS) * SETTINGS.repeats
    adapter = load_adapter(tmp_path)
    assert adapter.options == json.loads(json.dumps(made.options))
    assert "`disco`" in (tmp_path / "README.md").read_text()
    options, calibration = adapter.options, adapter.options["calibration"]
    table = calibration["table"]
    assert len(table) == SETTINGS.num_contenders == 1 + 4 + 2
    ours = [name for name in table if name.startswith("threshold")]
    best = max(ours, key=lambda name: table[name]["ratio"])
    assert calibration["best"] == best
    assert f"threshold {options['threshold']}, longest {options['max_draft_tokens']}" == best
    assert calibration["best_static"] in {"static 1", "static 3"}
    assert all(row["identical"] for row in table.values())
    assert calibration["prompts"] == ["v0", "v1"]
    assert adapter.options["draft"] == before.options["draft"]
    for name, tensor in before.tensors.items():
        assert tensor.equal(adapter.tensors[name])


def test_the_table_is_a_median_of_medians() -> None:
    records = [
        record("a", "p", 0, 4.0),
        record("a", "p", 1, 1.0),
        record("a", "p", 2, 8.0),
        record("a", "q", 0, 16.0, identical=False, tau=4.0),
        record("b", "p", 0, 2.0),
    ]
    table = tabulate(records)
    # Prompt p: 2x, 8x, and 1x as fast as plain; prompt q: half as fast.
    assert table["a"]["ratio"] == (2 + 0.5) / 2
    assert table["a"]["tau"] == (3 * 1 + 4) / 4
    assert (table["a"]["identical"], table["b"]["identical"]) == (False, True)
    assert fastest(table, ["a", "b"]) == "b"
    assert fastest(table, ["a"]) == "a"


def test_forwards_at_their_median_cost_do_not_depend_on_a_slow_moment() -> None:
    def run(name: str, prompt: str, forwards: int, levels: int, slow: float = 1.0) -> Record:
        stats = SpecStats([], draft_forwards=levels)
        stats.verify_seconds, stats.draft_seconds = slow * forwards, slow * 0.1 * levels
        return record(name, prompt, 0, slow, target_forwards=forwards, stats=stats)

    records = [
        run("reference", "p", 10, 50),
        run("a", "p", 10, 10, slow=3.0),
        run("b", "p", 5, 100),
        run("reference", "q", 20, 100),
        run("a", "q", 20, 20),
        run("b", "q", 20, 0),
    ]
    table = compare_by_forwards(records, {"b": "disco"})
    assert table["reference"]["ratio_at_one_price"] == 1
    assert table["a"]["ratio_at_one_price"] == pytest.approx(15 / 11)
    # The median over the prompts: 1x and 1.5x.
    assert table["b"]["ratio_at_one_price"] == pytest.approx((15 / 15 + 30 / 20) / 2)


@pytest.mark.by_default(judge=("time",))
@pytest.mark.parametrize(
    ("judge", "figure"), [("time", "ratio"), ("forwards", "ratio_at_one_price")]
)
def test_the_judge_is_the_one_that_was_asked_for(tmp_path: Path, judge: Any, figure: str) -> None:
    model = build("llama")
    save_disco_adapter(tmp_path, model)
    settings = replace(SETTINGS, judge=judge)
    options = calibrate_disco(model, words(), tmp_path, PROMPTS, settings).options
    found = options["calibration"]
    assert found["judge"] == judge
    for best, kind in ((found["best"], "threshold"), (found["best_static"], "static")):
        mine = [name for name in found["table"] if name.startswith(kind)]
        assert best == max(mine, key=lambda name: found["table"][name][figure])


def test_no_further_prompt_is_begun_when_the_time_is_up(tmp_path: Path) -> None:
    model = build("llama")
    save_disco_adapter(tmp_path, model)
    settings = replace(SETTINGS, seconds=1e-6)
    found = calibrate_disco(model, words(), tmp_path, PROMPTS, settings).options["calibration"]
    assert found["prompts"] == ["v0"]
    assert len(found["table"]) == SETTINGS.num_contenders


def test_only_prompts_that_were_held_back(tmp_path: Path) -> None:
    save_disco_adapter(tmp_path, build("llama"), validation_prompts=["v1", "v7"])
    adapter = load_adapter(tmp_path)
    assert validation_prompts(adapter, PROMPTS) == PROMPTS[1:]
    with pytest.raises(OptionError, match="none of the 1 prompts is in the held-out set"):
        validation_prompts(adapter, PROMPTS[:1])


def test_prompts_of_the_benchmark_are_refused(tmp_path: Path) -> None:
    theirs = load_prompts()[3]
    renamed = Prompt("mine", "x", theirs.turns)
    with pytest.raises(OptionError, match="prompt 'mine' belongs to the benchmark"):
        check_prompts([*PROMPTS, renamed])
    with pytest.raises(OptionError, match="no prompts"):
        calibrate_disco(build("llama"), words(), tmp_path, [], SETTINGS)


def test_forwards_count_and_not_the_seconds_of_one_generation() -> None:
    generations = [
        ForwardCounts("static", 10, 1.0, 20, 0.2),
        # The same numbers of forward passes, timed at a slow moment.
        ForwardCounts("static", 10, 3.0, 20, 0.9),
        ForwardCounts("static", 5, 0.5, 40, 0.4),
        ForwardCounts("disco", 8, 0.8, 10, 0.3),
        ForwardCounts("none", 12, 1.2, 0, 0.0),
    ]
    costs = seconds_at_median_cost(generations)
    # A verify pass costs 0.1, a draft level 0.01, or 0.03 with a classifier.
    assert costs == pytest.approx([1.2, 1.2, 0.9, 1.1, 1.2])
