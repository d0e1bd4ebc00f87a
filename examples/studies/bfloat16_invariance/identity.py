"""Compare the greedy bfloat16 output of every strategy with `none`, token for token.

Run `python -m examples.studies.bfloat16_invariance.identity --help` for the options.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from examples.studies.lossless.identity import compare
from examples.studies.models import load_model
from hf_spec.cli.options import ENTRY
from hf_spec.common.machine import environment
from hf_spec.common.prompts import load_prompts
from hf_spec.evaluation.bench.contenders import Contender, strategy
from hf_spec.methods.entries import parse_entry


def contender(model: Any, text: str, compile_layers: bool) -> Contender:
    """Return the strategy of an entry, with or without compiled layers."""
    entry = parse_entry(text, compile_layers=compile_layers)
    return strategy(model, entry.config, entry.assistant, entry.short_name)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 only if every output is identical to that of `none`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--per-task", type=int, help="prompts of each task; all by default")
    parser.add_argument("--strategy", action="append", required=True, help=f"{ENTRY}, repeatable")
    parser.add_argument("--layers", choices=["uncompiled", "compiled", "both"], default="both")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model, torch.bfloat16)
    prompts = load_prompts(per_task=options.per_task)
    record: dict[str, Any] = {
        "command": ["examples.studies.bfloat16_invariance.identity", *(argv or sys.argv[1:])],
        "environment": environment(),
        "dtype": "bfloat16",
        "new_tokens": options.new_tokens,
        "threads": torch.get_num_threads(),
        "identical": {},
        "rows": {},
    }
    for layers in ("uncompiled", "compiled"):
        if options.layers not in (layers, "both"):
            continue
        none, *others = (
            contender(model, text, layers == "compiled") for text in ("none", *options.strategy)
        )
        rows = compare(none, others, prompts, tokenizer, options.new_tokens)
        for other in others:
            mine = [row for row in rows if row["contender"] == other.name]
            same = sum(row["identical"] for row in mine)
            record["identical"][f"{other.name}, {layers}"] = f"{same} of {len(mine)}"
            print(f"{other.name}, {layers}: {same} of {len(mine)} identical", flush=True)
        record["rows"][layers] = rows
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(row["identical"] for rows in record["rows"].values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
