"""Effect of the number of adaptive tokens: figures 3 and 4 of the SDSAT paper, from bench records.

Run as `python -m examples.studies.sdsat.adaptive_figures RECORDS.json --out plot.png` on the
records of a benchmark with contenders such as `sdsat:num_adaptive=3@ADAPTER`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_spec.methods.entries import parse_entry
from hf_spec.methods.sdsat.drafter import SdsatConfig

FIGURES = {
    "accept_rate": "drafts accepted / drafts sent",
    "tau": "drafts accepted / verify",
    "loop_ms": "loop, ms",
    "tokens_per_second": "tokens / s",
}
ROUNDS = ("verify_rounds", "fused_rounds")


def figures(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, dict[str, float]]]:
    """Return the figures of each loop with k adaptive tokens, over all prompts and repetitions.

    Args:
        records: benchmark records as dictionaries; other strategies are ignored.

    Returns:
        Loop -> k -> the figures named in `FIGURES`. The loop is "two forwards" or "fused", or
        either with its tree. "ratio" is the total time of plain `generate()` divided by that of
        the loop. A loop ends with a verification.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if not record["contender"].startswith("sdsat"):
            continue
        _, config, _ = parse_entry(record["contender"])
        assert isinstance(config, SdsatConfig), "named so"
        if config.num_adaptive is not None:
            groups[_loop(config), config.num_adaptive].append(record)
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for (loop, k), group in sorted(groups.items()):
        found[loop][k] = _row(group)
    return dict(found)


def _loop(config: SdsatConfig) -> str:
    loop = "fused" if config.fused else "two forwards"
    return loop if config.tree is None else f"{loop}, tree"


def _row(group: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    stats = [record["stats"] for record in group]
    verified = sum(one["counters"].get(name, 0) for one in stats for name in ROUNDS)
    drafted = sum(one["drafted_tokens"] for one in stats)
    accepted = sum(sum(one["accepted_by_position"]) for one in stats)
    seconds = sum(record["seconds"] for record in group)
    tokens = sum(record["new_tokens"] for record in group)
    return {
        "accept_rate": accepted / max(drafted, 1),
        "tau": accepted / max(verified, 1),
        "loop_ms": 1e3 * seconds / max(verified, 1),
        "tokens_per_second": tokens / seconds,
        "tokens_per_forward": tokens / sum(record["target_forwards"] for record in group),
        "ratio": sum(record["plain_seconds"] for record in group) / seconds,
    }


def plot(found: Mapping[str, Mapping[int, Mapping[str, float]]], path: Path) -> None:
    """Draw every figure over k, a line for each loop.

    Args:
        found: result of `figures`.
        path: file to write; its suffix sets the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(2, 2).flat, FIGURES.items(), strict=True):
        for loop, rows in found.items():
            axes.plot(list(rows), [row[name] for row in rows.values()], marker="o", label=loop)
        axes.set_xlabel("k, adaptive tokens")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if name == "accept_rate":
            axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, help="JSON file of a benchmark")
    parser.add_argument("--out", type=Path, required=True, help="plot to write, .svg or .png")
    options = parser.parse_args(argv)
    found = figures(json.loads(options.records.read_text(encoding="utf-8"))["records"])
    if not found:
        parser.error(f"{options.records} has no contender such as sdsat:num_adaptive=3@ADAPTER")
    plot(found, options.out)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
