"""Speed by the number of concurrent sequences: the load above which drafting does not pay off.

    python -m examples.studies.serving.load_curve --model MODEL --strategy lookup --strategy auto \
        --prompt-tokens 128 --new-tokens 32 --out load_curve.json

At a load of N, `generate_batch` runs N sequences of equal length. Complete rounds are counted from
when all sequences have their first token until the first sequence ends, so neither prefill nor free
slots affect the result. `none` and the strategies alternate, after a first turn that is not
counted. The same command resumes an interrupted run at the first load that is missing in `--out`.
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
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench.runner import rotated
from hf_spec.methods.entries import Entry, parse_entries

LOADS = (1, 2, 4, 8, 16, 32, 64)
# Minimum number of sequences per load; low loads run them in several batches.
FEWEST = 8


class EndOfWindowError(Exception):
    """Raised to end a run when the first of its sequences ends."""


class Window(BatchStreamer):
    """Streamer that records time and token count of rounds in which all streams take part."""

    def __init__(self, streams: int):
        super().__init__(self.take, self.end)
        self.streams = streams
        self.answers: dict[int, list[int]] = defaultdict(list)
        self.rounds: list[tuple[float, int]] = []

    def take(self, index: int, tokens: list[int]) -> None:
        """Store tokens; each round starts with tokens of the first sequence."""
        if index == 0 and len(self.answers) == self.streams:
            self.rounds.append((time.perf_counter(), sum(map(len, self.answers.values()))))
        self.answers[index] += tokens

    def end(self, index: int) -> None:
        """Stop when the first sequence ends."""
        raise EndOfWindowError


def answer(
    model: Any, entry: Entry, prompts: Sequence[list[int]], load: int, new_tokens: int
) -> dict[str, Any]:
    """Run prompts with `load` streams; return time and tokens of the windows, and answers."""
    seconds, count, answers = 0.0, 0, []
    for start in range(0, max(load, FEWEST), load):
        window = Window(load)
        with suppress(EndOfWindowError):
            model.generate_batch(
                list(islice(cycle(prompts), start, start + load)),
                spec_strategy=entry.config,
                assistant=entry.assistant,
                max_batch=load,
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=window,
            )
        (began, before), (ended, after) = window.rounds[0], window.rounds[-1]
        seconds, count = seconds + ended - began, count + after - before
        answers += [window.answers[index] for index in range(load)]
    return {
        "strategy": entry.short_name,
        "load": load,
        "seconds": round(seconds, 4),
        "new_tokens": count,
        "answers": answers,
    }


def agree(answers: Sequence[list[int]], others: Sequence[list[int]]) -> bool:
    """Return True if the answers are equal up to the shorter length of each pair."""
    pairs = zip(answers, others, strict=True)
    return all(a == b for pair in pairs for a, b in zip(*pair, strict=False))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: tokens per second of each load and strategy, and speedup over `none`."""
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
    """Run the command line, print the table, and write every run as JSON."""
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
    # All answers have the same length.
    model.generation_config.eos_token_id = None
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
        plain: list[list[int]] = []
        for repeat in range(options.repeats + 1):
            runs = [
                answer(model, entry, known, load, options.new_tokens)
                for entry in rotated(entries, repeat)
            ]
            for run in runs:
                answers = run.pop("answers")
                plain = plain or answers
                run["equal"] = agree(answers, plain)
            # Skip the first turn, which packs weights and measures costs.
            records += sorted(runs, key=lambda run: run["strategy"] != "none") if repeat else []
        timing.write_record(options, {**settings, "records": records})
        print(table(records), flush=True)
    different = sum(not record["equal"] for record in records)
    print(f"{different} of {len(records)} runs have other answers than `none`")


if __name__ == "__main__":
    main()
