"""Time greedy answers with all logits, and with only the logits that can be the largest.

Run `python -m examples.studies.kernels.greedy_head --help` for the options. The tokens must be
equal. An untimed first answer creates the 8-bit copy of the output head. The last column of the
table is the largest number of rows for which the copy is used on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from examples.studies import timing
from hf_spec.backend.cpu import packed_weights
from hf_spec.common.prompts import load_prompts
from hf_spec.common.tables import Table

# Minimum size of a screened weight, by form.
FORMS = {"all logits": 1 << 62, "best logits": 0}


def measure(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    strategy: str,
    new_tokens: int,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Return the seconds per new token of every answer by form, and the most screened rows."""

    def answer(prompt: Tensor, form: str) -> Tensor:
        call = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new_tokens}
        with patch.object(packed_weights, "MIN_ELEMENTS", FORMS[form]):
            text: Tensor = model.generate(prompt, **call, do_sample=False, spec_strategy=strategy)
        return text[0, prompt.shape[1] :]

    with patch.object(packed_weights, "SCREENED_FROM", 1):
        answer(prompts[0], "best logits")
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for prompt in [*prompts] * repeats:
        answers = []
        for form in FORMS:
            start = clock()
            answers.append(answer(prompt, form))
            seconds[form].append((clock() - start) / len(answers[-1]))
        assert torch.equal(*answers), "the forms answer differently"
    forms = packed_weights.packed_weights_of(model.get_output_embeddings().weight)
    screened = forms and forms.screened
    return {"seconds": seconds, "most_rows": screened.most_rows if screened else 0}


def table(found: dict[str, Any]) -> str:
    """Return Markdown: minimum and median milliseconds per token, and the median speedup."""
    lines = []
    for strategy, entry in found.items():
        runs = [entry["seconds"][form] for form in FORMS]
        ratio = median(all_logits / best for all_logits, best in zip(*runs, strict=True))
        times = (f"{min(run) * 1e3:.1f} / {median(run) * 1e3:.1f}" for run in runs)
        lines.append([strategy, *times, f"{ratio:.2f}", str(entry["most_rows"])])
    return Table(["strategy", *FORMS, "ratio", "up to rows"], lines).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--strategy", action="append", help="default: none and lookup")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    model, clock = timing.begin(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = [prompt.encode(tokenizer) for prompt in load_prompts(options.prompts)]
    found = {
        strategy: measure(model, prompts, strategy, options.max_new_tokens, options.repeats, clock)
        for strategy in options.strategy or ["none", "lookup"]
    }
    print(table(found))
    timing.write_record(options, {"strategies": found})


if __name__ == "__main__":
    main()
