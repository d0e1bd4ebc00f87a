"""Measure `lookup` with a `LookupStore` on repeated prompts, as in GRPO.

Every epoch samples a group of answers to each prompt: with `lookup` alone, with one store for all
prompts, and with a store per prompt. Drafts have a fixed size, so tau does not depend on the
machine.

Run `python -m examples.studies.lookup_store.repeated_prompts --help` for the options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import hf_spec
from examples.studies.models import load_model
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.common.tables import Table

ALONE, ONE_STORE, PER_PROMPT = "lookup", "one store", "a store per prompt"
CONFIG = hf_spec.LookupConfig(copy_length=7, max_draft_tokens=7)


def measure(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a record per epoch, prompt, and variant."""
    shared = hf_spec.LookupStore()
    own = [hf_spec.LookupStore() for _ in prompts]
    for epoch in range(options.epochs):
        for index, prompt in enumerate(prompts):
            ids = prompt.encode(tokenizer)
            stores = {ALONE: None, ONE_STORE: shared, PER_PROMPT: own[index]}
            for name, store in stores.items():
                # All variants use the same random numbers.
                torch.manual_seed(1000 * epoch + index)
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    spec_strategy=CONFIG,
                    assistant=store,
                    do_sample=True,
                    temperature=options.temperature,
                    top_k=0,
                    num_return_sequences=options.group,
                    max_new_tokens=options.new_tokens,
                    return_dict_in_generate=True,
                )
                yield {
                    "epoch": epoch,
                    "prompt": prompt.id,
                    "task": prompt.task,
                    "variant": name,
                    "row_forwards": sum(row.target_forwards for row in output.spec_stats.rows),
                    "accepted": output.spec_stats.accepted_tokens,
                    "drafted": output.spec_stats.drafted_tokens,
                }


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tau and the acceptance rate of each epoch and variant."""
    rows = []
    for epoch in sorted({record["epoch"] for record in records}):
        for variant in (ALONE, ONE_STORE, PER_PROMPT):
            part = [r for r in records if (r["epoch"], r["variant"]) == (epoch, variant)]
            forwards, accepted, drafted = (
                sum(record[name] for record in part)
                for name in ("row_forwards", "accepted", "drafted")
            )
            rows.append(
                {
                    "epoch": epoch,
                    "variant": variant,
                    "tau": accepted / max(forwards, 1),
                    "acceptance_rate": accepted / max(drafted, 1),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary as Markdown, a row per epoch."""
    names = (ALONE, ONE_STORE, PER_PROMPT)
    taus = {(row["epoch"], row["variant"]): f"{row['tau']:.2f}" for row in rows}
    epochs = sorted({row["epoch"] for row in rows})
    lines = [[str(epoch + 1), *(taus[epoch, name] for name in names)] for epoch in epochs]
    return Table(["epoch", *names], lines).markdown()


def main(argv: list[str] | None = None) -> None:
    """Print tau per epoch and write the records as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: those of hf_spec")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--group", type=int, default=2, help="answers per prompt and epoch")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model)
    prompts = load_prompts(options.prompts)
    # Evenly spaced, to cover all tasks of the file.
    prompts = prompts[:: max(1, len(prompts) // options.num_prompts)][: options.num_prompts]
    records = list(measure(model, tokenizer, prompts, options))
    rows = summary(records)
    print(table(rows))
    if options.out:
        hidden = ("out", "prompts", "model")
        settings = {name: value for name, value in vars(options).items() if name not in hidden}
        facts = {"environment": environment(), "settings": settings, "summary": rows}
        write_json(options.out, {**facts, "records": records}, indent=1)


if __name__ == "__main__":
    main()
