"""The plots of a benchmark: speed by task and by batch, acceptance by position, cost of a forward.

`draw` takes what `hf-spec bench --out` writes; `python -m hf_spec.bench.report` calls it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_spec.bench import plots
from hf_spec.bench.report import ALL, notice, spread
from hf_spec.data.prompts import MIXED

# What the forms of `measure_step_cost` are called in a plot.
FORMS = {
    "transformers": "transformers, DynamicCache",
    "off": "hf_spec, packing off",
    "auto": "hf_spec",
}
SPEED = "speed relative to plain generate()"


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the results hold.

    Args:
        results: of a benchmark, as in its JSON file.
        folder: made if need be; its plots are replaced.

    Returns:
        The files written: speed_by_task.png, speed_by_batch.png if there were several batch sizes,
        acceptance_by_position.png if something was drafted, verify_cost.png if it was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = _about(results)
    rows = results["summary"]
    smallest = min(row["batch_size"] for row in rows)
    single = [row for row in rows if row["batch_size"] == smallest]
    written = [folder / "speed_by_task.png"]
    spread_of = "median and 20th to 80th percentile"
    plots.ranges(
        _by_task(single), f"{SPEED}: {spread_of}", written[0], f"{about}, batch size {smallest}"
    )
    if len({row["batch_size"] for row in rows}) > 1:
        written.append(folder / "speed_by_batch.png")
        plots.ranges(_by_batch(rows), f"{SPEED} at this size: {spread_of}", written[-1], about)
    if accepted := _by_position(single):
        labels = ("position in the draft", "accepted up to here, of drafts that reach it")
        written.append(folder / "acceptance_by_position.png")
        plots.lines(accepted, labels, written[-1], f"{about}, batch size {smallest}")
    if results.get("step_cost"):
        series, spreads = _step_cost(results["step_cost"])
        labels = ("nodes of one forward", "milliseconds")
        written.append(folder / "verify_cost.png")
        plots.lines(series, labels, written[-1], f"{about}\n{spread_of}", spreads)
    return written


def _about(results: Mapping[str, Any]) -> str:
    facts = [Path(str(results.get("model", "model"))).name, results.get("dtype"), notice(results)]
    return ", ".join(str(fact) for fact in facts if fact)


def _by_task(rows: Sequence[Mapping[str, Any]]) -> dict[str, plots.Ranges]:
    tasks = sorted({row["task"] for row in rows} - {ALL, MIXED})
    return {
        task: _ratios([row for row in rows if row["task"] == task])
        for task in ([ALL, *tasks] if len(tasks) > 1 else [ALL])
    }


def _by_batch(rows: Sequence[Mapping[str, Any]]) -> dict[str, plots.Ranges]:
    overall = [row for row in rows if row["task"] == ALL]
    return {
        f"batch size {size}": _ratios([row for row in overall if row["batch_size"] == size])
        for size in dict.fromkeys(row["batch_size"] for row in overall)
    }


def _ratios(rows: Sequence[Mapping[str, Any]]) -> plots.Ranges:
    return {row["contender"]: (row["ratio_p20"], row["ratio"], row["ratio_p80"]) for row in rows}


def _by_position(rows: Sequence[Mapping[str, Any]]) -> plots.Series:
    return {
        row["contender"]: (range(1, len(shares) + 1), shares)
        for row in rows
        if row["task"] == ALL and (shares := row.get("acceptance_by_position"))
    }


def _step_cost(
    seconds: Mapping[str, Mapping[Any, Sequence[float]]],
) -> tuple[plots.Series, plots.Spreads]:
    series, spreads = {}, {}
    for form, by_count in seconds.items():
        # JSON has the numbers of nodes as texts.
        counts = [int(count) for count in by_count]
        found = [spread([1e3 * value for value in values]) for values in by_count.values()]
        name = FORMS[form]
        series[name] = counts, [middle for _, middle, _ in found]
        spreads[name] = [low for low, _, _ in found], [high for _, _, high in found]
    return series, spreads
