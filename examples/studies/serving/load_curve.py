"""Speed by the number of streams: from which load on drafts bring nothing.

    python -m examples.studies.serving.load_curve --model MODEL --strategy lookup --strategy auto \
        --prompt-tokens 128 --new-tokens 32 --out load_curve.json

At a load of N, `generate_batch` keeps N sequences going. Time and tokens are counted while all
places are taken: from the end of the N-th sequence, to that of as many more (at least 8). `none`
and the strategies take turns, after a first turn that is not counted. A command that was stopped
goes on with the first load that `--out` has not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, islice
from typing import Any

from transformers import AutoTokenizer

from examples.studies import timing
from hf_spec import BatchStreamer
from hf_spec.common.prompts import load_prompts
from hf_spec.evaluation.bench.entries import Entry, parse_entries
from hf_spec.evaluation.bench.tables import Table

LOADS = (1, 2, 4, 8, 16, 32, 64)
# Sequences at low loads.
FEWEST = 8


class EnoughError(Exception):
    """Ends a run; the sequences that are going are dropped."""


class Window(BatchStreamer):
    """Collects all answers; counts seconds and tokens between the ends of two sequences."""

    def __init__(self, first: int, last: int):
        super().__init__(self.take, self.end)
        self.first, self.last = first, last
        self.answers: dict[int, list[int]] = defaultdict(list)
        self.ended: list[int] = []
        self.seconds = 0.0
        self.tokens = 0

    def take(self, index: int, tokens: list[int]) -> None:
        """Store tokens of a sequence."""
        self.answers[index] += tokens
        self.tokens += len(tokens)

    def end(self, index: int) -> None:
        """Start or stop counting at the end of a sequence."""
        self.ended.append(index)
        now = time.perf_counter()
        if len(self.ended) == self.first:
            self.seconds, self.tokens = -now, 0
        elif len(self.ended) == self.last:
            self.seconds += now
            raise EnoughError


def answer(
    model: Any, entry: Entry, prompts: Sequence[list[int]], load: int, new_tokens: int
) -> dict[str, Any]:
    """Answer prompts with `load` streams; return time, tokens, and the answers that ended."""
    window = Window(load, load + max(load, FEWEST))
    # Places are taken until the end.
    needed = list(islice(cycle(prompts), window.last + load))
    with suppress(EnoughError):
        model.generate_batch(
            [list(prompt) for prompt in needed],
            spec_strategy=entry.config,
            assistant=entry.assistant,
            max_batch=load,
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=window,
        )
    return {
        "strategy": entry.short_name,
        "load": load,
        "seconds": round(window.seconds, 4),
        "new_tokens": window.tokens,
        "answers": {index: window.answers[index] for index in window.ended},
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: per load and strategy tokens per second, and the ratio to `none`."""
    names = list(dict.fromkeys(record["strategy"] for record in records))
    rows = []
    for load in dict.fromkeys(record["load"] for record in records):
        mine = [record for record in records if record["load"] == load]
        rounds = {n: [r for r in mine if r["strategy"] == n] for n in names}
        speeds = {n: [r["new_tokens"] / r["seconds"] for r in rounds[n]] for n in names}
        row = [str(load), f"{statistics.median(speeds['none']):.1f}"]
        for name in names[1:]:
            pairs = zip(speeds["none"], speeds[name], strict=True)
            ratios = [other / none for none, other in pairs]
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
    settings["strategies"] = [entry.short_name for entry in entries]
    records = timing.gone_on(options.out, settings)
    measured = {record["load"] for record in records}
    for load in options.load or LOADS:
        if load in measured:
            continue
        answers: dict[int, list[int]] = {}
        for repeat in range(options.repeats + 1):
            turn = repeat % len(entries)
            runs = [
                answer(model, entry, known, load, options.new_tokens)
                for entry in [*entries[turn:], *entries[:turn]]
            ]
            for run in runs:
                mine = run.pop("answers")
                run["equal"] = all(answers.setdefault(i, mine[i]) == mine[i] for i in mine)
            # The first turn packs weights and measures costs.
            records += sorted(runs, key=lambda run: run["strategy"] != "none") if repeat else []
        timing.write_record(options, {**settings, "records": records})
        print(table(records), flush=True)
    different = sum(not record["equal"] for record in records)
    print(f"{different} of {len(records)} runs have other answers than the first run")


if __name__ == "__main__":
    main()
