"""Compare strategies with plain `generate()` prompt by prompt: slowest, median, and fastest.

Run `python -m examples.studies.full_table.by_prompt --help` for the options. All contenders run in
rotating order on every prompt. The fastest repetition counts, since other work on the machine only
ever adds time. The record is written after every prompt, and the same command resumes it. Outputs
that differ from plain `generate()` are classified as ties or bugs. With --no-plain, the first
strategy is the reference instead of plain `generate()`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import hf_spec
from examples.studies import timing
from hf_spec.common.prompts import load_prompts
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench.contenders import Contender, plain, strategy
from hf_spec.evaluation.bench.runner import rotated
from hf_spec.evaluation.lossless.mismatch import differences
from hf_spec.methods.entries import parse_entries

# New tokens of the warm-up: enough passes to screen the output head (see `packed_weights`).
WARM_UP = 80


@dataclass(frozen=True)
class Timed:
    """Results of one contender on one prompt; all but the times are from the last repetition.

    Attributes:
        prompt, contender: names.
        seconds: elapsed or processor time of each repetition, depending on --processor-time.
        elapsed: wall-clock time of each repetition.
        new_tokens: number of generated tokens.
        tau: accepted tokens per target forward pass; None for plain.
        nodes: target tokens per forward pass; None for plain.
        draft_seconds, verify_seconds: time of the parts; None for plain.
        counters: counters of the drafter.
        differences: differences from the reference output, classified as by `hf-spec verify`.
    """

    prompt: str
    contender: str
    seconds: list[float]
    elapsed: list[float]
    new_tokens: int
    tau: float | None
    nodes: float | None
    draft_seconds: float | None
    verify_seconds: float | None
    counters: dict[str, int]
    differences: list[dict[str, Any]]

    def per_token(self, clock: str) -> float:
        """Return the minimum time per token, by `seconds` or `elapsed`."""
        return min(getattr(self, clock)) / self.new_tokens


@dataclass(frozen=True)
class Subject:
    """Model, contenders with the reference first, and the workload.

    With `other_weights`, outputs of other libraries are not compared, since their weights differ.
    """

    model: Any
    contenders: Sequence[Contender]
    clock: Callable[[], float]
    new_tokens: int
    repeats: int
    other_weights: bool = False


def measure(subject: Subject, name: str, ids: Tensor, first: int = 0) -> Iterator[Timed]:
    """Run every contender on a prompt of (1, L) ids; the first repetition starts with `first`."""
    contenders, new_tokens, clock = subject.contenders, subject.new_tokens, subject.clock
    mask = torch.ones_like(ids)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    elapsed: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    runs = {}
    for repeat in range(subject.repeats):
        for contender in rotated(contenders, first + repeat):
            start, began = clock(), time.perf_counter()
            runs[contender.name] = contender.run(ids, new_tokens, mask)
            seconds[contender.name].append(clock() - start)
            elapsed[contender.name].append(time.perf_counter() - began)
    said = runs[contenders[0].name].sequence.tolist()
    for contender in contenders:
        run = runs[contender.name]
        stats, got = run.stats, run.sequence.tolist()
        examined = contender.ours or not subject.other_weights
        yield Timed(
            name,
            contender.name,
            seconds[contender.name],
            elapsed[contender.name],
            len(got) - ids.shape[1],
            stats and stats.tau,
            stats and (stats.target_tokens - ids.shape[1]) / stats.target_forwards,
            stats and stats.draft_seconds,
            stats and stats.verify_seconds,
            dict(stats.counters) if stats else {},
            [asdict(one) for one in differences(subject.model, ids, said, got, new_tokens)]
            if examined
            else [],
        )


def table(records: Sequence[Timed], clock: str = "seconds") -> str:
    """Return a Markdown table of speedups over prompts, tau, and nodes per strategy."""
    names = list(dict.fromkeys(record.contender for record in records))
    reference = {r.prompt: r.per_token(clock) for r in records if r.contender == names[0]}
    rows = []
    for name in names[1:]:
        mine = [record for record in records if record.contender == name]
        ratios = sorted((reference[r.prompt] / r.per_token(clock), r.prompt) for r in mine)
        speeds = [ratio for ratio, _ in ratios]
        tau = [r.tau for r in mine if r.tau is not None]
        nodes = [r.nodes for r in mine if r.nodes is not None]
        rows.append(
            [
                name,
                f"{speeds[0]:.2f} ({ratios[0][1]})",
                f"{speeds[len(speeds) // 5]:.2f}",
                f"{median(speeds):.2f}",
                f"{speeds[-1]:.2f}",
                f"{mean(tau):.2f}" if tau else "-",
                f"{mean(nodes):.1f}" if nodes else "-",
                f"{sum(not r.differences for r in mine)}/{len(mine)}",
            ]
        )
    heads = ["strategy", "min", "20 %", "median", "max", "tau", "tokens a forward", "identical"]
    return Table(heads, rows).markdown()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `timing` and of the workload."""
    timing.add_options(parser)
    parser.add_argument("--strategy", action="append", required=True, help="as for `bench`")
    parser.add_argument("--assistant", action="append", default=[], help="as for `bench`")
    parser.add_argument("--per-task", type=int, default=2, help="prompts of each task")
    parser.add_argument("--prompts", type=Path, help="JSON lines with id, task, and turns")
    parser.add_argument("--task", action="append", default=[], help="only this task")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers first")
    parser.add_argument("--minutes", type=float, default=inf, help="start no prompt after these")


def begin(options: argparse.Namespace) -> tuple[PreTrainedModel, Callable[[], float]]:
    """Return the model, compiled with `--compile`, and the clock."""
    model, clock = timing.begin(options)
    if options.compile:
        print(hf_spec.compile(model))
    return model, clock


def ours(model: Any, options: argparse.Namespace) -> list[Contender]:
    """Return plain `generate()` and the requested strategies."""
    return [plain(model)] + [
        strategy(model, entry.config, entry.assistant, entry.short_name)
        for entry in parse_entries(options.strategy, options.assistant)
    ]


def run(options: argparse.Namespace, subject: Subject, facts: Mapping[str, Any]) -> None:
    """Measure the prompts that are not in the record yet, and print the table of all."""
    began = time.perf_counter()
    settings = {
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "processor_time": options.processor_time,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "strategies": [one.name for one in subject.contenders if one.ours],
        "assistants": list(map(timing.shown, options.assistant)),
        "compile": options.compile,
        **facts,
    }
    records = [Timed(**record) for record in timing.gone_on(options.out, settings)]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    chosen = load_prompts(options.prompts, options.per_task, options.task)
    prompts = {prompt.id: prompt.encode(tokenizer) for prompt in chosen}
    longest = max(prompts.values(), key=lambda ids: ids.shape[1])
    for contender in subject.contenders:
        contender.run(longest, WARM_UP, torch.ones_like(longest))
    known = {record.prompt for record in records}
    for turn, name in enumerate(prompts):
        if name in known:
            continue
        if time.perf_counter() - began > 60 * options.minutes:
            break
        records += measure(subject, name, prompts[name], turn)
        rows = [asdict(record) for record in records]
        timing.write_record(options, {**settings, "records": rows})
    print(table(records))
    if options.processor_time:
        print("\nBy elapsed time:\n", table(records, "elapsed"), sep="\n")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--no-plain", action="store_true", help="leave plain generate() out")
    options = parser.parse_args(argv)
    model, clock = begin(options)
    contenders = ours(model, options)[options.no_plain :]
    run(options, Subject(model, contenders, clock, options.new_tokens, options.repeats), {})


if __name__ == "__main__":
    main()
