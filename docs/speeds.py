"""Generate the speeds in README.md and docs/benchmarks.md from one record per model.

`python -m docs.speeds` writes the blocks between `<!-- speeds: NAME -->` and `<!-- end -->` and the
bars in docs/images/speeds.svg; tests/test_docs.py checks that they are current. Records are
written by `python -m examples.studies.full_table.measure` and
`examples.studies.real_models.human_eval`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, median
from typing import Any

from examples.studies.real_models.human_eval import speedups
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench.summary import spread
from hf_spec.evaluation.trace.pictures import ACCEPTED, PALE, Canvas

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "speeds.svg"
PAGES = ("README.md", "docs/benchmarks.md")
RECORDS = {"smollm2": ROOT / "examples/studies/full_table/smollm2_current.json"}
HUMAN_EVAL = ROOT / "examples/studies/real_models/qwen_human_eval_epyc.json"
# Rows of the short table in the README.
SHORT = ("plain", "none", "lookup", "falcon", "auto")
LABELS = {
    "plain": "plain `generate()`",
    "none": '`"none"`: the engine without drafting',
    "transformers lookup": "prompt lookup of transformers",
    "transformers assistant": "assisted decoding of transformers, same draft model",
}
BLOCK = re.compile(r"(?<=<!-- speeds: )(\w+) -->\n.*?(?=<!-- end -->)", re.S)


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the summary rows for batch size 1, all tasks, and default options."""
    return [
        {**row, "name": row["contender"].partition("@")[0]}
        for row in record["summary"]
        if row["task"] == "all" and row["batch_size"] == 1 and ":" not in row["contender"]
    ]


def setting(record: dict[str, Any]) -> str:
    """Return one sentence with the measured workload, the machine, and the date."""
    env, suite = record["environment"], record["suite"]
    plural = "s" if suite["repeats"] > 1 else ""
    return (
        f"{record['model']}, {record['dtype']}, greedy, batch size 1, "
        f"{rows_of(record)[0]['outputs']} prompts, {suite['new_tokens']} new tokens, "
        f"{suite['repeats']} repetition{plural}, interleaved; {_machine(env)}, {record['date']}."
    )


def _machine(env: dict[str, Any]) -> str:
    return (
        f"{env['device']}, {env['threads']} threads, {env['cpu_capability']}, "
        f"torch {env['torch']}, transformers {env['transformers']}"
    )


def _label(name: str) -> str:
    return LABELS.get(name, f'`"{name}"`')


def table(record: dict[str, Any], names: tuple[str, ...] | None = None) -> str:
    """Return a Markdown table; `names` selects rows."""
    rows = [row for row in rows_of(record) if names is None or row["name"] in names]
    columns = (
        "",
        "tokens/s",
        "speedup over plain `generate()`, median (p20 - p80)",
        "over `none`",
        "tokens per forward pass",
        "identical",
    )
    cells = [
        (
            _label(row["name"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}x ({row['ratio_p20']:.2f} - {row['ratio_p80']:.2f})",
            f"{row['ratio_to_none']:.2f}x",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['identical']} of {row['outputs']}",
        )
        for row in rows
    ]
    return Table(columns, cells).markdown()


def human_eval_table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of speeds and passed tests on HumanEval."""
    columns = (
        "",
        "tokens/s",
        "speedup over plain `generate()`, median (p20 - p80)",
        "over `none`",
        "tau",
        "pass@1",
        "identical",
        "ties",
    )
    cells = []
    for name in records[0]["results"]:
        mine = [record["results"][name] for record in records]
        taus = [result["tau"] for result in mine if result["tau"] is not None]
        low, middle, high = spread(speedups(records, "plain", name))
        differing = sum(bool(result["differences"]) for result in mine)
        cells.append(
            (
                _label(name.partition(":")[0]),
                f"{sum(r['new_tokens'] for r in mine) / sum(r['seconds'] for r in mine):.1f}",
                f"{middle:.2f}x ({low:.2f} - {high:.2f})",
                f"{median(speedups(records, 'none', name)):.2f}x",
                f"{fmean(taus):.2f}" if taus else "",
                f"{sum(result['passed'] for result in mine)} of {len(mine)}",
                f"{len(mine) - differing} of {len(mine)}",
                f"{differing}",
            )
        )
    return Table(columns, cells).markdown()


def human_eval_setting(record: dict[str, Any]) -> str:
    """Return one sentence with the measured workload, the machine, and the date."""
    env = record["environment"]
    return (
        f"{record['model']}, {record['dtype']}, greedy, batch size 1, {len(record['records'])} "
        f"problems of HumanEval, up to {record['new_tokens']} new tokens, interleaved; "
        f"{_machine(env)}, {record['date']}."
    )


def blocks() -> dict[str, str]:
    """Return the text of each block, by name."""
    made = {}
    for model, path in RECORDS.items():
        record = json.loads(path.read_text(encoding="utf-8"))
        made[f"{model}_short"] = f"{table(record, SHORT)}\n\n{setting(record)}"
        made[model] = f"{table(record)}\n\n{setting(record)}"
    record = json.loads(HUMAN_EVAL.read_text(encoding="utf-8"))
    made["human_eval"] = f"{human_eval_table(record['records'])}\n\n{human_eval_setting(record)}"
    return made


def written(text: str) -> str:
    """Return a page with regenerated blocks."""
    made = blocks()
    return BLOCK.sub(lambda found: f"{found[1]} -->\n{made[found[1]]}\n", text)


def picture() -> str:
    """Draw tokens per second: plain, the engine in gray, and what drafting adds in green."""
    record = json.loads(RECORDS["smollm2"].read_text(encoding="utf-8"))
    rows = [row for row in rows_of(record) if row["name"] in SHORT]
    engine = next(row["tokens_per_second"] for row in rows if row["name"] == "none")
    left, top, line = 110, 40, 30
    unit = 300 / max(row["tokens_per_second"] for row in rows)
    canvas = Canvas(480, top + len(rows) * line + 50, "Tokens per second: engine and drafting")
    canvas.text(20, 24, "tokens per second; gray: the engine, green: added by drafting")
    for index, row in enumerate(rows):
        speed, y = row["tokens_per_second"], top + index * line
        base = min(speed, engine)
        canvas.text(
            left - 12, y + 17, "generate()" if row["name"] == "plain" else row["name"], "end"
        )
        canvas.box(left, y + 2, (base * unit, 20), PALE)
        if speed > base:
            canvas.box(left + base * unit, y + 2, ((speed - base) * unit, 20), ACCEPTED)
        canvas.text(left + speed * unit + 8, y + 17, f"{speed:.0f}  ({row['ratio']:.2f}x)")
    identical = sum(row["identical"] for row in rows)
    outputs = sum(row["outputs"] for row in rows)
    env = record["environment"]
    foot = f"{record['model']}, {env['device']}, {env['threads']} threads; "
    canvas.text(
        20, top + len(rows) * line + 30, f"{foot}{identical} of {outputs} outputs identical"
    )
    return str(canvas)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
