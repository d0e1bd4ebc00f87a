"""Calibration of DISCO's threshold and longest draft by measured latency (`hf-spec calibrate`).

Every pair of a threshold and a length cap generates every validation prompt, in turn with every
static length; the pair with the best median speed relative to a static length of five goes into the
adapter, and the whole table with it (Mamou et al. 2024, arXiv 2405.04304, appendix E). The best
static length is found in the same runs: the baseline that was tuned as hard.

Differences are small and a machine that is used for other things hides them, so all ways are also
compared by their forwards, each kind at one price, and the best can be chosen by that.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
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
from hf_spec.evaluation.bench.prices import Spent, at_one_price
from hf_spec.evaluation.bench.runner import Plan, Record, time_contenders
from hf_spec.evaluation.bench.settings import CalibrationSettings
from hf_spec.evaluation.bench.summary import spread, spread_of
from hf_spec.methods.disco.classifier import METHOD
from hf_spec.methods.disco.drafter import DiscoConfig, find_draft_model
from hf_spec.methods.draft_model.config import DraftConfig

# The first way, which every other is compared with.
REFERENCE = "reference"
# What `CalibrationSettings.judge` names -> the figure of the table that it goes by.
FIGURES = {"time": "ratio", "forwards": "ratio_at_one_price"}


def calibrate_disco(  # noqa: PLR0913 - what is measured, on what, and how
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    prompts: Sequence[Prompt],
    settings: CalibrationSettings,
    draft: PreTrainedModel | None = None,
    progress: Callable[[], None] = lambda: None,
) -> SpecAdapter:
    """Measure the grid, and write the best threshold and length into the adapter in `folder`.

    `prompts` are for validation, `draft` is by default the draft model that the adapter names, and
    `progress` is called after every timed run.

    Returns:
        The adapter as written; `options["calibration"]` has the table.

    Raises:
        OptionError: if there are no prompts, or some are those of the benchmarks.
        AssistantError: if the adapter or its draft model cannot be used.
    """
    check_prompts(prompts)
    adapter = load_adapter(folder, METHOD)
    adapter.base.check(model)
    draft = draft or find_draft_model(adapter, model)
    ways = {
        f"threshold {threshold}, longest {longest}": DiscoConfig(
            adapter=str(folder), acceptance_threshold=threshold, max_draft_tokens=longest
        )
        for threshold, longest in product(settings.thresholds, settings.longest)
    }
    static = {f"static {n}": DraftConfig(max_draft_tokens=n) for n in settings.static_lengths}
    reference = DraftConfig(max_draft_tokens=settings.reference)
    contenders = [
        strategy(model, config, draft, name)
        for name, config in {REFERENCE: reference, **static, **ways}.items()
    ]
    plan = Plan(settings.new_tokens, settings.repeats)
    records: list[Record] = []
    end = time.monotonic() + (settings.seconds or math.inf)
    for found in time_contenders(contenders, prompts, tokenizer, plan, progress):
        records += found
        if time.monotonic() > end:
            break
    counted = count_forwards(records, dict.fromkeys(ways, METHOD))
    table = {name: {**row, **counted[name]} for name, row in tabulate(records).items()}
    figure = FIGURES[settings.judge]
    best = fastest(table, ways, figure)
    options = {
        **adapter.options,
        "threshold": ways[best].acceptance_threshold,
        "max_draft_tokens": ways[best].max_draft_tokens,
        "calibration": {
            **asdict(settings),
            "prompts": list(dict.fromkeys(record.prompt for record in records)),
            "environment": environment(),
            "best": best,
            "best_static": fastest(table, static, figure),
            "table": table,
        },
    }
    calibrated = replace(adapter, options=options)
    save_with_card(folder, calibrated)
    return calibrated


def tabulate(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Way -> its speed relative to the reference, tau, and whether its outputs are the same."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.contender].append(record)
    return {
        name: {
            **spread_of(group, "ratio"),
            "tau": fmean(record.tau or 0.0 for record in group),
            "seconds": median(record.seconds for record in group),
            "identical": all(record.identical for record in group),
        }
        for name, group in groups.items()
    }


def count_forwards(
    records: Sequence[Record], kinds: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Way -> its speed relative to `REFERENCE` with all forwards of a kind at one price.

    `kinds` names the kind of drafts of ways whose levels cost more than those of the others.
    """
    spent = []
    for record in records:
        stats, kind = record.stats, kinds.get(record.contender, "")
        assert stats is not None
        assert record.target_forwards is not None
        target = record.target_forwards, stats.verify_seconds
        spent.append(Spent(kind, *target, stats.draft_forwards, stats.draft_seconds))
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record, cost in zip(records, at_one_price(spent), strict=True):
        found[record.contender][record.prompt].append(cost)
    base = {prompt: fmean(costs) for prompt, costs in found[REFERENCE].items()}
    table = {}
    for name, prompts in found.items():
        low, middle, high = spread([base[p] / fmean(costs) for p, costs in prompts.items()])
        figure = FIGURES["forwards"]
        table[name] = {f"{figure}_p20": low, figure: middle, f"{figure}_p80": high}
    return table


def fastest(table: dict[str, dict[str, Any]], names: Any, figure: str = "ratio") -> str:
    """The way among `names` with the best median of a ratio; ties to the first."""
    return max(names, key=lambda name: table[name][figure])


def validation_prompts(adapter: SpecAdapter, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those of `prompts` that the classifier's training held back; there must be some."""
    held = set(adapter.options.get("validation_prompts", ()))
    found = [prompt for prompt in prompts if prompt.id in held]
    if not found:
        raise OptionError(
            f"none of the {len(prompts)} prompts was held back when the classifier was trained; "
            "give the file that the responses were made from, or --all to use every prompt"
        )
    return found


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that benchmarks report on, for a number tuned on them would be no result."""
    if not prompts:
        raise OptionError("there are no prompts to calibrate on")
    reported = {prompt.turns[0] for prompt in load_prompts()}
    for prompt in prompts:
        if prompt.turns[0] in reported:
            raise OptionError(
                f"prompt {prompt.id!r} is one of the benchmark's own; calibrate on others"
            )
