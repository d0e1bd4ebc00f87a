"""Measure `lookup` with a store of earlier answers on similar requests, as agents send them.

Every prompt is sent several times with different first lines, like the requests of a program that
retries or processes a list. Each repetition starts with an empty store; plain `generate()`,
`lookup`, and `lookup` with the store answer every request in turn. Ratios are speedups over plain
`generate()` on the same request in the same repetition.

Run `python -m examples.studies.lookup_store.agent_turns --help` for the options.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hf_spec
from examples.studies.models import load_model
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench.contenders import Contender, plain, strategy
from hf_spec.evaluation.bench.runner import timed

OPENINGS = (
    "Request {0}.",
    "This is call number {0} of the day.",
    "[attempt {0}]",
)
PLAIN, LOOKUP, STORE = "plain", "lookup", "lookup, store"


def requests(prompts: Sequence[Prompt], times: int) -> list[tuple[int, Prompt]]:
    """Return (number, prompt) pairs: all prompts with a new first line, `times` times over."""
    found = []
    for number in range(times):
        for prompt in prompts:
            opening = OPENINGS[number % len(OPENINGS)].format(number + 1)
            turns = (f"{opening}\n\n{prompt.turns[0]}", *prompt.turns[1:])
            found.append((number, replace(prompt, turns=turns)))
    return found


def contenders(model: Any) -> list[Contender]:
    """Return plain `generate()`, `lookup`, and `lookup` with a new store."""
    config = hf_spec.LookupConfig()
    return [
        plain(model),
        strategy(model, config, name=LOOKUP),
        strategy(model, config, hf_spec.LookupStore(), STORE),
    ]


def measure(
    model: Any, tokenizer: Any, asked: Sequence[tuple[int, Prompt]], new_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield a record per request and contender of one repetition."""
    ways = contenders(model)
    for way in ways:
        # Warm-up: weight packing and first calls are not timed.
        way.run(torch.ones(1, 4, dtype=torch.long), 2)
    for number, prompt in asked:
        ids = prompt.encode(tokenizer)
        expected: list[int] = []
        for way in ways:
            run, seconds = timed(lambda way=way, ids=ids: way.run(ids, new_tokens))
            answer = run.sequence[ids.shape[1] :].tolist()
            expected = expected or answer
            yield {
                "prompt": prompt.id,
                "task": prompt.task,
                "number": number,
                "contender": way.name,
                "seconds": seconds,
                "new_tokens": len(answer),
                "target_forwards": run.target_forwards,
                "identical": answer == expected,
            }


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per request number and contender: speedup, tokens per forward, identity."""
    seconds = {
        (r["repetition"], r["number"], r["prompt"]): r["seconds"]
        for r in records
        if r["contender"] == PLAIN
    }
    rows = []
    for number in sorted({r["number"] for r in records}):
        for name in (LOOKUP, STORE):
            mine = [r for r in records if (r["number"], r["contender"]) == (number, name)]
            ratios = [
                seconds[r["repetition"], r["number"], r["prompt"]] / r["seconds"] for r in mine
            ]
            rows.append(
                {
                    "number": number,
                    "contender": name,
                    "ratio": median(ratios),
                    "slowest": min(ratios),
                    "tokens_per_forward": sum(r["new_tokens"] for r in mine)
                    / sum(r["target_forwards"] for r in mine),
                    "identical": sum(r["identical"] for r in mine),
                    "outputs": len(mine),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a summary as Markdown."""
    head = [
        "request",
        "",
        "ratio to plain, median",
        "least",
        "tokens / target forward",
        "identical",
    ]
    lines = [
        [
            f"{row['number'] + 1}",
            row["contender"],
            f"{row['ratio']:.2f}",
            f"{row['slowest']:.2f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['identical']} / {row['outputs']}",
        ]
        for row in rows
    ]
    return Table(head, lines).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write the records as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--per-task", type=int, default=1, help="prompts of each task")
    parser.add_argument("--times", type=int, default=3, help="how often each prompt is asked")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model)
    asked = requests(load_prompts(per_task=options.per_task), options.times)
    records = [
        {"repetition": repetition, **record}
        for repetition in range(options.repeats)
        for record in measure(model, tokenizer, asked, options.new_tokens)
    ]
    print(table(summary(records)))
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        facts = {"environment": environment(), "settings": settings, "records": records}
        options.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
