"""Measure the cost of a target forward pass by number of tree nodes.

Run `python -m examples.studies.full_table.step_cost --help` for the options.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_spec.common.machine import environment
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench.profiling import measure_step_cost


def table(seconds: dict[str, dict[int, list[float]]]) -> str:
    """Return a Markdown table of median milliseconds by node count, and costs relative to one."""
    counts = sorted(seconds["auto"])
    middle = {form: {n: median(v) * 1e3 for n, v in rows.items()} for form, rows in seconds.items()}
    auto, plain = middle["auto"], middle["transformers"]
    rows = [[f"{form}, ms", *(f"{ms[n]:.0f}" for n in counts)] for form, ms in middle.items()]
    for name, unit in (("its own 1 node", auto[1]), ("transformers' 1 token", plain[1])):
        cells = (f"{auto[n] / unit:.2f}" for n in counts)
        rows.append([f"auto, relative to {name}", *cells])
    return Table(["nodes", *map(str, counts)], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every repetition as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--context", type=int, default=200, help="tokens before the root")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(3, vocab, (options.context,), generator=generator).tolist()
    seconds = measure_step_cost(model, context, options.repeats)
    print(table(seconds))
    if options.out:
        facts: dict[str, Any] = {"environment": environment(), "context": options.context}
        options.out.write_text(json.dumps({**facts, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
