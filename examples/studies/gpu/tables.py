"""Write the tables of the project README and of this study from the records.

    python -m examples.studies.gpu.tables

Tables are written between `<!-- gpu: NAME -->` and `<!-- end -->`. The README's table shows
`CURRENT`; to update it, replace that file with the `rounds.json` of a new run of `first_light`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_spec.common.tables import Table

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
PAGES = (ROOT / "README.md", FOLDER / "README.md")
BLOCK = re.compile(r"(<!-- gpu: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
CURRENT = FOLDER / "rounds_h100.json"
ESTIMATES = FOLDER / "estimates.json"
# Records of the study's tables, by heading.
RUNS = {"A, uncompiled": FOLDER / "rounds_h100_uncompiled.json", "B, fused": CURRENT}
# The model and the rows of the README's table.
MODEL = "llama-3.1-8b"
LABELS = {
    "plain": "plain `generate()`, eager",
    "plain, compiled": "plain `generate()`, static cache, compiled",
    "none": '`"none"`: the engine without drafting',
    "lookup": '`"lookup"`',
    "draft, default": '`"draft"`, with the sizes of Llama-3.2-1B',
}
NAMES = {
    "plain": LABELS["plain"],
    "plain, compiled": LABELS["plain, compiled"],
    "draft, default": "draft, default policy",
    "tree": "tree of 15 nodes",
}
ORDER = ("plain", "plain, compiled", "none, uncompiled", "none", "lookup", "lookup, top-p")
ORDER += ("draft of 5", "draft, default", "tree", "auto")
SIZES = {"llama-3.1-8b": "Llama-3.1-8B", "smollm2-135m": "SmolLM2-135M"}


def load(path: Path) -> dict[str, Any]:
    """Read a record."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def ways(record: dict[str, Any], model: str) -> dict[str, dict[str, Any]]:
    """Return the figures at batch size 1 by way; empty if the model was not measured."""
    found: dict[str, dict[str, Any]] = record.get(model, {}).get("batch 1", {})
    return found


def short() -> str:
    """Return the README's table and its caption."""
    record = load(CURRENT)
    found = ways(record, MODEL)
    plain = found["plain"]["ms_per_token"]
    rows = [
        (label, _milliseconds(found[way]), _speedup(plain, found[way]), _tau(found[way]))
        for way, label in LABELS.items()
        if way in found
    ]
    head = ("", "ms per token", "speedup over plain `generate()`", "tau")
    return f"{Table(head, rows).markdown()}\n\n{_caption(record)}"


def _speedup(plain: float, one: dict[str, Any]) -> str:
    bound = ", upper bound" if one.get("tau") else ""
    return f"{plain / one['ms_per_token']:.1f}x{bound}"


def _caption(record: dict[str, Any]) -> str:
    env, last = record["environment"], record[MODEL]["prompts"][-1]
    first = {way: f"{min(seconds):.2f} s" for way, seconds in last["seconds"].items()}
    return (
        f"{env['device']}, torch {env['torch']}, transformers {env['transformers']}, "
        f"{record['date']}; bfloat16, batch size 1,\n128 new tokens, compiled layers, medians of 3 "
        f"calls. First token after a prompt of {last['tokens']:,} tokens: {first['none']} with "
        f'`"none"`,\n{first["plain"]} with plain `generate()`.'
    )


def study(model: str) -> str:
    """Return the milliseconds per token of all runs for one model."""
    records = {heading: ways(load(path), model) for heading, path in RUNS.items()}
    last = list(records.values())[-1]
    rows = [
        (
            NAMES.get(way, way),
            _tau(last.get(way, {})),
            *(_milliseconds(found.get(way, {}), spread=True) for found in records.values()),
        )
        for way in ORDER
        if any("ms_per_token" in found.get(way, {}) for found in records.values())
    ]
    return Table((f"sizes of {SIZES[model]}", "tau", *records), rows).markdown()


def _tau(one: dict[str, Any]) -> str:
    return f"{one['tau']:.3g}" if "tau" in one else ""


def _milliseconds(one: dict[str, Any], spread: bool = False) -> str:
    if "ms_per_token" not in one:
        return ""
    bounds = one.get("ms_per_token_spread") if spread else None
    suffix = f" {[round(bound, 2) for bound in bounds]}" if bounds else ""
    return f"{round(one['ms_per_token'], 2)}{suffix}"


def prefill() -> str:
    """Return the seconds to the first token of long prompts."""
    rows = [
        (
            f"sizes of {SIZES[model]}",
            f"{one['tokens']:,}",
            *(f"{round(min(one['seconds'][way]), 3)}" for way in ("plain", "none")),
        )
        for model, found in load(CURRENT).items()
        if model in SIZES
        for one in found["prompts"]
    ]
    return Table(("", "tokens", "plain `generate()`", "`none`"), rows).markdown()


def estimates(record: Mapping[str, Any] | None = None) -> str:
    """Return the table of a record of `estimates`: times on the hosts of both runs."""
    head = ("", "tokens", "GB read", "launches", "kernels", "plain, eager", "static + compiled")
    rows = []
    for one in (record or load(ESTIMATES))["estimates"]:
        times = one["ms_per_token"].values()
        cells = [
            " / ".join("" if run[way] is None else f"{run[way]:.1f}" for run in times).strip(" /")
            for way in ("plain", "none", "lookup", "draft")
        ]
        cells.insert(1, f"{one['static_compiled_ms']:.1f}")
        sizes = f"{one['read'] / 1e9:.2f}", f"{one['eager']:.0f}", f"{one['kernels']:.0f}"
        rows.append((one["model"], f"{one['context']:,}", *sizes, *cells))
    return Table((*head, "`none`", "lookup", "draft of 5"), rows).markdown()


def checks(record: Mapping[str, Any] | None = None) -> str:
    """Return the table of measured rows beside their estimates."""
    rows = [
        (
            one["run"],
            one["model"],
            NAMES.get(one["way"], one["way"]),
            f"{one['estimated']:.2f}",
            f"{round(one['measured'], 2)}",
            f"{100 * (one['estimated'] / one['measured'] - 1):+.0f}%",
        )
        for one in (record or load(ESTIMATES))["compared"]
    ]
    return Table(("run", "sizes of", "", "estimated", "measured", "error"), rows).markdown()


TABLES: dict[str, Callable[[], str]] = {
    "short": short,
    "prefill": prefill,
    "estimates": estimates,
    "checks": checks,
    **{f"rounds_{model}": lambda model=model: study(model) for model in SIZES},  # type: ignore[misc]
}


def written(page: str) -> str:
    """Return a page with regenerated tables."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


def main(pages: Sequence[Path] = PAGES) -> None:
    """Write all pages."""
    for path in pages:
        path.write_text(written(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
