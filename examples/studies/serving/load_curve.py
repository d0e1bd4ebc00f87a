"""Speed by the number of streams: from which load on drafts bring nothing.

    python -m examples.studies.serving.load_curve --model MODEL --strategy lookup --strategy auto \
        --prompt-tokens 128 --new-tokens 32 --out load_curve.json

At a load of N, `generate_batch` keeps N sequences going until all prompts are answered; there are
at least N + 8 prompts, so places are refilled. `none` and the strategies take turns, after a first
turn that is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from transformers import AutoTokenizer

from examples.studies import timing
from hf_spec.common.prompts import load_prompts
from hf_spec.evaluation.bench.entries import Entry, parse_entries
from hf_spec.evaluation.bench.tables import Table

LOADS = (1, 2, 4, 8, 16, 32, 64)
# Prompts at low loads, and beyond the streams at high ones.
FEWEST, MORE = 8, 8


def answer_all(
    model: Any, entry: Entry, prompts: Sequence[list[int]], load: int, new_tokens: int
) -> dict[str, Any]:
    """Answer all prompts with `load` streams; return time, tokens, and the answers."""
    start = time.perf_counter()
    found = model.generate_batch(
        [list(prompt) for prompt in prompts],
        spec_strategy=entry.config,
        assistant=entry.assistant,
        max_batch=load,
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    seconds = time.perf_counter() - start
    outputs = [output.generated_tokens for output in found.values()]
    return {
        "strategy": entry.short_name,
        "load": load,
        "seconds": round(seconds, 4),
        "new_tokens": sum(map(len, outputs)),
        "outputs": outputs,
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: per load and strategy tokens per second, and the ratio to `none`."""
    names = list(dict.fromkeys(record["strategy"] for record in records))
    rows = []
    for load in dict.fromkeys(record["load"] for record in records):
        mine = [record for record in records if record["load"] == load]
        rounds = {n: [r for r in mine if r["strategy"] == n] for n in names}
        speeds = [r["new_tokens"] / r["seconds"] for r in rounds["none"]]
        row = [str(load), f"{statistics.median(speeds):.1f}"]
        for name in names[1:]:
            pairs = zip(rounds["none"], rounds[name], strict=True)
            ratios = [none["seconds"] / other["seconds"] for none, other in pairs]
            row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
        rows.append(row)
    heads = ["streams", "`none`, tokens/s", *(f"`{name}` over `none`" for name in names[1:])]
    return Table(heads, rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the table and writes every run as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    timing.add_options(parser)
    parser.add_argument("--strategy", action="append", required=True, help="as for `bench`")
    parser.add_argument("--assistant", action="append", default=[], help="as for `bench`")
    parser.add_argument("--load", type=int, action="append", help="default: 1 to 64")
    parser.add_argument("--prompt-tokens", type=int, help="longest prompt; default: all prompts")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    model, _ = timing.begin(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    known = [prompt.encode(tokenizer)[0].tolist() for prompt in load_prompts()]
    longest = options.prompt_tokens or max(map(len, known))
    known = [prompt for prompt in known if len(prompt) <= longest]
    entries = parse_entries(["none", *options.strategy], options.assistant)
    settings = {"prompt_tokens": longest, "prompts": len(known), "new_tokens": options.new_tokens}
    records: list[dict[str, Any]] = []
    for load in options.load or LOADS:
        prompts = list(islice(cycle(known), max(FEWEST, load + MORE)))
        answers = None
        for repeat in range(options.repeats + 1):
            turn = repeat % len(entries)
            runs = [
                answer_all(model, entry, prompts, load, options.new_tokens)
                for entry in [*entries[turn:], *entries[:turn]]
            ]
            for run in runs:
                outputs = run.pop("outputs")
                answers = answers or outputs
                run["equal"] = outputs == answers
            # The first turn packs weights and measures costs.
            records += sorted(runs, key=lambda run: run["strategy"] != "none") if repeat else []
        timing.write_record(options, {**settings, "records": records})
        print(table(records), flush=True)
    different = sum(not record["equal"] for record in records)
    print(f"{different} of {len(records)} runs have other outputs than `none`")


if __name__ == "__main__":
    main()
