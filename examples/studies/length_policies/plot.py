"""Plot the record of `simulate.py`: time over the best fixed length, by cost of a draft token.

Run as `python -m examples.studies.length_policies.plot RECORD --measured RECORD --out PICTURE`.
Records of measurements are those of `examples.studies.full_table.by_prompt` with `draft` and two or
more of its fixed lengths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from examples.studies.full_table.by_prompt import Timed

TITLES = {
    "qwen_coder_draft": "Qwen2.5-Coder 1.5B, draft 0.5B",
    "smollm2_draft": "SmolLM2-135M, trained 2 layers",
    "smollm2_truncated": "SmolLM2-135M, first 20 layers",
}


def series(cells: Sequence[Mapping[str, Any]], node_cost: float) -> tuple[list[float], list[float]]:
    """Return costs of a draft token, and times relative to the best fixed length, in %."""
    chosen = [cell for cell in cells if cell["node_cost"] == node_cost and not cell["cold"]]
    return (
        [cell["draft_cost"] for cell in chosen],
        [100 * (cell["over_best_fixed"] - 1) for cell in chosen],
    )


def measured(record: Mapping[str, Any]) -> tuple[float, float]:
    """Return the cost of a draft token, and the time of `draft` relative to the best length, in %.

    The cost is the difference between the rounds of the shortest and the longest length, so that
    reading the prompt does not count.
    """
    rows: dict[str, list[Timed]] = {}
    for row in (Timed(**fields) for fields in record["records"]):
        rows.setdefault(row.contender.partition("@")[0], []).append(row)
    time = {name: mean(row.per_token("seconds") for row in of) for name, of in rows.items()}
    fixed = {
        int(name.partition("max_draft_tokens=")[2]): name
        for name in rows
        if name.startswith("draft:max_draft_tokens=")
    }
    shortest, longest = min(fixed), max(fixed)

    def draft_seconds(length: int) -> float:
        # A round yields tau + 1 tokens.
        of = rows[fixed[length]]
        return median(
            (row.draft_seconds or 0.0) * ((row.tau or 0.0) + 1) / row.new_tokens for row in of
        )

    step = median((row.verify_seconds or 0.0) / row.new_tokens for row in rows["none"])
    token = (draft_seconds(longest) - draft_seconds(shortest)) / (longest - shortest)
    return token / step, 100 * (time["draft"] / min(time[name] for name in fixed.values()) - 1)


def draw(
    record: Mapping[str, Mapping[str, Any]], measurements: Sequence[Mapping[str, Any]], out: Path
) -> None:
    """Draw one panel per draft model, with the policies before and after.

    `measurements` are records of the first panel's models.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TITLES), figsize=(9, 2.8), sharey=True)
    for panel, (name, title) in zip(axes, TITLES.items(), strict=True):
        for version, label in (("old", "loss budget"), ("new", "exploration")):
            panel.plot(*series(record[version][name], 0.02), marker="o", label=label)
        panel.axhline(0, color="gray", linewidth=0.8)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("draft token, in steps of the target")
    if measurements:
        points = zip(*map(measured, measurements), strict=True)
        axes[0].plot(*points, linestyle="", marker="x", color="black", label="measured")
    axes[0].set_ylabel("time over best\nfixed length (%)")
    # The lines of the first panel leave no room.
    axes[1].legend(*axes[0].get_legend_handles_labels(), frameon=False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--measured", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record, *measurements = (
        json.loads(path.read_text("utf-8")) for path in (options.record, *options.measured)
    )
    draw(record, measurements, options.out)


if __name__ == "__main__":
    main()
