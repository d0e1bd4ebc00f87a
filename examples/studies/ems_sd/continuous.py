"""Static batches against continuous batching with the same number of slots.

In a static batch, finished rows wait for the slowest one. EMS-SD proposes dynamic batching as a
remedy but does not measure it (Ni et al. 2024, arXiv 2405.07542, limitation 1). Here the same
prompts run in consecutive static batches and in one continuous batch, interleaved. For usage, run
`python -m examples.studies.ems_sd.continuous --help`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from examples.studies.timing import add_options, begin, write_record
from hf_spec.common.prompts import left_padded, load_prompts
from hf_spec.common.tables import Table

WAYS = ("static", "continuous")


def static(model: Any, texts: Sequence[Tensor], slots: int, **call: Any) -> dict[str, Any]:
    """Run the texts in batches of `slots`; return answers without padding, and counts."""
    answers, stats = [], []
    for start in range(0, len(texts), slots):
        batch = left_padded(texts[start : start + slots])
        output = model.generate(**batch, return_dict_in_generate=True, **call)
        rows = output.sequences[:, batch["input_ids"].shape[1] :].tolist()
        stats.append(output.spec_stats)
        answers += [
            row[: counts.new_tokens] for row, counts in zip(rows, stats[-1].rows, strict=True)
        ]
    return {
        "answers": answers,
        "target_forwards": sum(one.target_forwards for one in stats),
        "target_tokens": sum(one.target_tokens for one in stats),
    }


def continuous(model: Any, texts: Sequence[Tensor], slots: int, **call: Any) -> dict[str, Any]:
    """Run the texts with at most `slots` at a time; return answers and counts."""
    outputs = model.generate_batch([text.tolist() for text in texts], max_batch=slots, **call)
    return {
        "answers": [list(output.generated_tokens) for output in outputs.values()],
        "target_forwards": outputs.spec_stats.target_forwards,
        "target_tokens": outputs.spec_stats.target_tokens,
    }


def measure(  # noqa: PLR0913 - what is timed, on what, and how
    model: Any,
    texts: Sequence[Tensor],
    slots: Sequence[int],
    strategies: Sequence[str],
    new_tokens: int,
    repeats: int,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Return one record per repetition, number of slots, strategy, and way, interleaved."""
    ways = {"static": static, "continuous": continuous}
    records = []
    for repeat in range(repeats):
        for size in slots:
            for strategy in strategies:
                call = {"max_new_tokens": new_tokens, "do_sample": False, "spec_strategy": strategy}
                found = {}
                for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
                    begun = clock()
                    found[way] = ways[way](model, texts, size, **call)
                    found[way]["seconds"] = clock() - begun
                identical = found["static"]["answers"] == found["continuous"]["answers"]
                for way in WAYS:
                    tokens = sum(map(len, found[way].pop("answers")))
                    records.append(
                        {
                            "slots": size,
                            "strategy": strategy,
                            "way": way,
                            "repeat": repeat,
                            "identical": identical,
                            "new_tokens": tokens,
                            **found[way],
                        }
                    )
    return records


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per number of slots and strategy; medians over repetitions."""
    rows = []
    for slots, strategy in dict.fromkeys((r["slots"], r["strategy"]) for r in records):
        mine = [r for r in records if (r["slots"], r["strategy"]) == (slots, strategy)]
        by_way = {way: [r for r in mine if r["way"] == way] for way in WAYS}
        pairs = list(zip(by_way["static"], by_way["continuous"], strict=True))
        rows.append(
            {
                "slots": slots,
                "strategy": strategy,
                "forwards": {way: found[0]["target_forwards"] for way, found in by_way.items()},
                "tokens": {way: found[0]["target_tokens"] for way, found in by_way.items()},
                "speed": median(slow["seconds"] / fast["seconds"] for slow, fast in pairs),
                "speeds": [slow["seconds"] / fast["seconds"] for slow, fast in pairs],
                "identical": all(r["identical"] for r in mine),
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary as a Markdown table."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "slots": lambda row: str(row["slots"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "target forward passes: static": lambda row: str(row["forwards"]["static"]),
        "continuous": lambda row: str(row["forwards"]["continuous"]),
        "speed over static (range)": lambda row: (
            f"{row['speed']:.2f} ({min(row['speeds']):.2f} - {max(row['speeds']):.2f})"
        ),
        "identical": lambda row: "yes" if row["identical"] else "no",
    }
    return Table.of(columns, rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--per-task", type=int, help="prompts of each task; default: all")
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--strategies", nargs="+", default=["none", "lookup"])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(argv)
    model, clock = begin(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [prompt.encode(tokenizer)[0] for prompt in load_prompts(per_task=options.per_task)]
    records = measure(
        model,
        texts,
        options.slots,
        options.strategies,
        options.new_tokens,
        options.repeats,
        clock,
    )
    rows = summary(records)
    print(table(rows))
    facts = {"model": options.model, "prompts": len(texts), "new_tokens": options.new_tokens}
    write_record(options, {**facts, "summary": rows, "records": records})


if __name__ == "__main__":
    main()
