"""Do rows of a batch in half precision differ from plain `generate()` at ties only?

Rounding in bfloat16 depends on the shape of a forward pass, so plain `generate()` itself may give
a row another answer in a batch than alone. Here every row of an unpadded batch with lookup
(`batches.LOOKUP`, `--prompt-only`) is compared with plain `generate()` of the row alone, and every
difference is classified (`hf_spec.evaluation.lossless.mismatch`). For usage, run
`python -m examples.studies.ems_sd.ties --help`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.studies.ems_sd.batches import LOOKUP, in_batch
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import left_padded, load_prompts
from hf_spec.drafting.config import StrategyConfig
from hf_spec.evaluation.lossless.mismatch import differences
from hf_spec.training.responses import end_tokens, until_end


def examine(
    model: Any,
    texts: Sequence[Tensor],
    batches: Sequence[Sequence[int]],
    config: StrategyConfig,
    new_tokens: int,
) -> Iterator[dict[str, Any]]:
    """Compare the rows of batches with plain `generate()` of each row alone, greedily.

    Args:
        model: the target.
        texts: (L,) int64 prompts.
        batches: per batch the indices of its prompts.
        config: strategy and batching.
        new_tokens: maximum number of tokens generated per row.

    Yields:
        Per batch the indices of its prompts, and per row the `Difference`s as dicts.
    """
    ends = end_tokens(model)
    alone: dict[int, list[int]] = {}
    examined: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    call: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    for batch in batches:
        inputs = left_padded([texts[index] for index in batch])
        output = model.generate(**inputs, **call, spec_strategy=config)
        answers = output[:, inputs["input_ids"].shape[1] :].tolist()
        rows = []
        for index, answer in zip(batch, answers, strict=True):
            prompt = texts[index][None]
            if index not in alone:
                alone[index] = model.generate(prompt, **call)[0].tolist()
            got = [*prompt[0].tolist(), *until_end(answer, ends)]
            if (key := (index, *got)) not in examined:
                found = differences(model, prompt, alone[index], got, new_tokens)
                examined[key] = [asdict(difference) for difference in found]
            rows.append(examined[key])
        yield {"prompts": list(batch), "differences": rows}


def summary(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the number of rows, of rows without differences, and of differences by kind."""
    rows = [row for record in records for row in record["differences"]]
    kinds = Counter(difference["kind"] for row in rows for difference in row)
    return {"rows": len(rows), "equal": sum(not row for row in rows), **kinds}


def main(argv: list[str] | None = None) -> None:
    """Run the command line, print the summary, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--task", default="summarization", help="task of the prompts")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--batches", type=int, default=3, help="batches of each size")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [prompt.encode(tokenizer)[0] for prompt in load_prompts(tasks=[options.task])]
    numbered = product(options.batch_sizes, range(options.batches))
    batches = [in_batch(number, size, len(texts)) for size, number in numbered]
    config = replace(LOOKUP, prompt_only=True, batching="unpadded")
    arguments = " ".join(argv if argv is not None else sys.argv[1:])
    facts = {
        "command": f"python -m examples.studies.ems_sd.ties {arguments}",
        "environment": environment(),
    }
    records: list[dict[str, Any]] = []
    with torch.no_grad():
        for record in examine(model, texts, batches, config, options.new_tokens):
            records.append(record)
            counts = summary(records)
            print(len(record["prompts"]), "rows:", counts, flush=True)
            write_json(options.out, {**facts, "summary": counts, "records": records})


if __name__ == "__main__":
    main()
