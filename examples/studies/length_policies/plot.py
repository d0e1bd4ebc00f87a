"""Plot the record of `simulate.py`: time over the best fixed length, by cost of a draft token.

Run as `python -m examples.studies.length_policies.plot RECORD --out PICTURE`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def draw(record: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Draw one panel per draft model, with the policies before and after."""
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
    axes[0].set_ylabel("time over best\nfixed length (%)")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw(json.loads(options.record.read_text("utf-8")), options.out)


if __name__ == "__main__":
    main()
