"""Calibration of DISCO's threshold and maximum draft length by latency (`hf-spec calibrate`).

Every pair of threshold and maximum length generates from every validation prompt, in turn with
every static length. The pair with the best median speedup over a static length of five is written
into the adapter, with the whole table (Mamou et al. 2024, arXiv 2405.04304, appendix E). The same
runs determine the best static length, so the baseline is tuned as well.

Differences are small, and other work on the machine hides them. Therefore every contender is also
compared by its forward passes, each kind at its median cost; `judge` selects this criterion.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import PreTrainedModel

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.common.errors import OptionError
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.evaluation.bench.contenders import strategy
from hf_spec.evaluation.bench.runner import Plan, Record, time_contenders
from hf_spec.evaluation.bench.summary import per_prompt, spread_of
from hf_spec.evaluation.settings import CalibrationSettings
from hf_spec.methods.disco.classifier import METHOD
from hf_spec.methods.disco.drafter import DiscoConfig, find_draft_model
from hf_spec.methods.draft_model.loading import DraftConfig

# Name of the contender that all others are compared with.
REFERENCE = "reference"
# `CalibrationSettings.judge` -> column of the table.
FIGURES = {"time": "ratio", "forwards": "ratio_at_one_price"}


def calibrate_disco(  # noqa: PLR0913 - model, prompts, settings
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    prompts: Sequence[Prompt],
    settings: CalibrationSettings,
    draft: PreTrainedModel | None = None,
    progress: Callable[[], None] = lambda: None,
) -> SpecAdapter:
    """Measure the grid and write the best threshold and length into the adapter in `folder`.

    `prompts` are for validation; `draft` defaults to the draft model named in the adapter.
    `progress` is called after every timed run. `options["calibration"]` of the returned adapter has
    the table. Raises `OptionError` if there are no prompts, or some belong to the benchmarks, and
    `AssistantError` if the adapter or its draft model cannot be used.
    """
    check_prompts(prompts)
    adapter = load_adapter(folder, METHOD)
    adapter.base.check(model)
    draft = draft or find_draft_model(adapter, model)
    grid = {
        f"threshold {threshold}, longest {longest}": DiscoConfig(
            adapter=str(folder), acceptance_threshold=threshold, max_draft_tokens=longest
        )
        for threshold, longest in product(settings.thresholds, settings.longest)
    }
    static = {f"static {n}": DraftConfig(max_draft_tokens=n) for n in settings.static_lengths}
    reference = DraftConfig(max_draft_tokens=settings.reference)
    contenders = [
        strategy(model, config, draft, name)
        for name, config in {REFERENCE: reference, **static, **grid}.items()
    ]
    plan = Plan(settings.new_tokens, settings.repeats)
    records: list[Record] = []
    end = time.monotonic() + (settings.seconds or math.inf)
    for batch_records in time_contenders(contenders, prompts, tokenizer, plan, progress):
        records += batch_records
        if time.monotonic() > end:
            break
    counted = compare_by_forwards(records, dict.fromkeys(grid, METHOD))
    table = {name: {**row, **counted[name]} for name, row in tabulate(records).items()}
    figure = FIGURES[settings.judge]
    best = fastest(table, grid, figure)
    calibration = {
        **asdict(settings),
        "prompts": list(dict.fromkeys(record.prompt for record in records)),
        "environment": environment(model.device),
        "best": best,
        "best_static": fastest(table, static, figure),
        "table": table,
    }
    chosen = {
        "threshold": grid[best].acceptance_threshold,
        "max_draft_tokens": grid[best].max_draft_tokens,
    }
    options = {**adapter.options, **chosen, "calibration": calibration}
    calibrated = replace(adapter, options=options)
    save_with_card(folder, calibrated)
    return calibrated


def tabulate(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return by contender its speedup over the reference, tau, and `identical` outputs."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.contender].append(record)
    return {
        name: {
            **spread_of(per_prompt(group), "ratio"),
            "tau": fmean(record.tau or 0.0 for record in group),
            "seconds": median(record.seconds for record in group),
            "identical": all(record.identical for record in group),
        }
        for name, group in groups.items()
    }


@dataclass(frozen=True)
class ForwardCounts:
    """Verifications and drafted levels of a generation, and their time.

    All levels of a `kind` of drafting, with the length decision, cost the same.
    """

    kind: str
    target_forwards: int
    target_seconds: float
    draft_forwards: int
    draft_seconds: float


def seconds_at_median_cost(generations: Sequence[ForwardCounts]) -> list[float]:
    """Return the seconds of each generation if every forward pass took the median of its kind.

    Seconds vary on a shared machine; these counts are exact, and the median is stable.
    """
    verify = median(g.target_seconds / g.target_forwards for g in generations)
    seconds: dict[str, list[float]] = defaultdict(list)
    for counts in generations:
        if counts.draft_forwards:
            seconds[counts.kind].append(counts.draft_seconds / counts.draft_forwards)
    levels = {kind: median(costs) for kind, costs in seconds.items()}
    return [
        verify * g.target_forwards + levels.get(g.kind, 0.0) * g.draft_forwards for g in generations
    ]


def compare_by_forwards(
    records: Sequence[Record], kinds: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Return contender -> its speedup over `REFERENCE` with every forward pass at its median cost.

    `kinds` names the kind of drafting of contenders whose levels cost more than the default.
    """
    generations = []
    for record in records:
        stats, num_forwards = record.stats, record.target_forwards
        assert stats is not None
        assert num_forwards is not None
        draft = stats.draft_forwards, stats.draft_seconds
        kind = kinds.get(record.contender, "")
        generations.append(ForwardCounts(kind, num_forwards, stats.verify_seconds, *draft))
    by_name: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record, cost in zip(records, seconds_at_median_cost(generations), strict=True):
        by_name[record.contender][record.prompt].append(cost)
    base = {prompt: fmean(costs) for prompt, costs in by_name[REFERENCE].items()}
    table = {}
    for name, prompts in by_name.items():
        ratios = {prompt: base[prompt] / fmean(costs) for prompt, costs in prompts.items()}
        table[name] = spread_of(ratios, FIGURES["forwards"])
    return table


def fastest(table: dict[str, dict[str, Any]], names: Any, figure: str = "ratio") -> str:
    """Return the name with the best median of a ratio; the first on ties."""
    return max(names, key=lambda name: table[name][figure])


def validation_prompts(adapter: SpecAdapter, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the held-out prompts of the classifier's training; raises if there are none."""
    held_out_ids = set(adapter.options.get("validation_prompts", ()))
    held_out = [prompt for prompt in prompts if prompt.id in held_out_ids]
    if not held_out:
        raise OptionError(
            f"none of the {len(prompts)} prompts is in the held-out set of the classifier's "
            "training; use the prompts file of its responses, or --all to use every prompt"
        )
    return held_out


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise `OptionError` for benchmark prompts: results on tuned prompts would be invalid."""
    if not prompts:
        raise OptionError("there are no prompts to calibrate on")
    reported = {prompt.turns[0] for prompt in load_prompts()}
    for prompt in prompts:
        if prompt.turns[0] in reported:
            raise OptionError(
                f"prompt {prompt.id!r} belongs to the benchmark; calibrate on other prompts"
            )
