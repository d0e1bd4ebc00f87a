"""Strategies against plain `generate()`, prompt by prompt: the slowest prompt, and the median.

Run as `python -m examples.studies.full_table.by_prompt --help` says. All run in turn on every
prompt; a prompt counts with its fastest repetition, plain's and the strategy's, since other work on
the machine only ever adds time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoTokenizer

from examples.studies import timing
from hf_spec.bench.contenders import Contender, plain, strategy
from hf_spec.bench.entries import assistant_finder, parse_entries
from hf_spec.bench.tables import Table
from hf_spec.data.prompts import Prompt, load_prompts


@dataclass(frozen=True)
class Timed:
    """What one contender did with one prompt in all repetitions.

    Attributes:
        prompt, contender: their names.
        seconds: of each repetition.
        tau: accepted tokens per target forward, in the last repetition; None for plain.
        nodes: target tokens per forward, likewise.
        draft_seconds, verify_seconds: likewise.
        counters: of the drafter, likewise.
        identical: whether it says what plain says.
    """

    prompt: str
    contender: str
    seconds: list[float]
    tau: float | None
    nodes: float | None
    draft_seconds: float | None
    verify_seconds: float | None
    counters: dict[str, int]
    identical: bool


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    new_tokens: int,
    repeats: int,
    clock: Callable[[], float],
) -> list[Timed]:
    """Every contender on every prompt; the first one is plain."""
    longest = max((prompt.encode(tokenizer) for prompt in prompts), key=lambda ids: ids.shape[1])
    for contender in contenders:
        contender.run(longest, 16, torch.ones_like(longest))
    found = []
    for prompt in prompts:
        ids = prompt.encode(tokenizer)
        mask = torch.ones_like(ids)
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        runs = {}
        for repeat in range(repeats):
            turn = repeat % len(contenders)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                start = clock()
                runs[contender.name] = contender.run(ids, new_tokens, mask)
                seconds[contender.name].append(clock() - start)
        said = runs[contenders[0].name].sequences.tolist()
        for name, run in runs.items():
            stats = run.stats
            forwards = stats.target_forwards if stats else 0
            found.append(
                Timed(
                    prompt.id,
                    name,
                    seconds[name],
                    stats and stats.tau,
                    stats and (stats.target_tokens - ids.shape[1]) / forwards,
                    stats and stats.draft_seconds,
                    stats and stats.verify_seconds,
                    dict(stats.counters) if stats else {},
                    run.sequences.tolist() == said,
                )
            )
    return found


def table(records: Sequence[Timed]) -> str:
    """Markdown: per strategy the ratios of speed over prompts, tau and nodes."""
    names = list(dict.fromkeys(record.contender for record in records))
    reference = {r.prompt: min(r.seconds) for r in records if r.contender == names[0]}
    rows = []
    for name in names[1:]:
        mine = [record for record in records if record.contender == name]
        ratios = sorted((reference[r.prompt] / min(r.seconds), r.prompt) for r in mine)
        speeds = [ratio for ratio, _ in ratios]
        rows.append(
            [
                name,
                f"{speeds[0]:.2f} ({ratios[0][1]})",
                f"{speeds[len(speeds) // 5]:.2f}",
                f"{median(speeds):.2f}",
                f"{speeds[-1]:.2f}",
                f"{mean(r.tau for r in mine if r.tau is not None):.2f}",
                f"{mean(r.nodes for r in mine if r.nodes is not None):.1f}",
                f"{sum(r.identical for r in mine)}/{len(mine)}",
            ]
        )
    heads = ["strategy", "min", "20 %", "median", "max", "tau", "tokens a forward", "identical"]
    return Table(heads, rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the table and writes every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument("--strategy", action="append", required=True, help="as for `bench`")
    parser.add_argument("--assistant", action="append", default=[], help="as for `bench`")
    parser.add_argument("--per-task", type=int, default=2, help="prompts of each of six tasks")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    model, clock = timing.begin(options)
    find = assistant_finder(model)
    contenders = [plain(model)] + [
        strategy(model, entry.config, find(entry.assistant), entry.short_name)
        for entry in parse_entries(options.strategy, options.assistant)
    ]
    records = measure(
        contenders,
        load_prompts(per_task=options.per_task),
        AutoTokenizer.from_pretrained(options.model),
        options.new_tokens,
        options.repeats,
        clock,
    )
    print(table(records))
    record = {
        "new_tokens": options.new_tokens,
        "strategies": options.strategy,
        "assistants": options.assistant,
        "records": [record.__dict__ for record in records],
    }
    timing.write_record(options, record)


if __name__ == "__main__":
    main()
