"""Single-line code infilling before and after training adaptive tokens.

As in tables 3 and 7 of Liu et al. 2024 (arXiv 2403.18647), single lines are masked. The model
reads the text before and after in its infilling format, and its line must equal the masked line
(Bavarian et al. 2022, arXiv 2207.14255). The lines come from HumanEval solutions or from Python
files. PSM orders prefix, suffix, and middle; SPM, used in the paper, puts the suffix first. A
`gated` adapter does not change greedy answers, so its accepted tokens are counted instead.

    python -m examples.studies.sdsat.infilling --model MODEL --human-eval HumanEval.jsonl.gz \
        --adapter LORA --gated ADAPTER --out infilling.json

The record is written after every line, and the same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from examples.studies import timing
from examples.studies.sdsat import task_quality
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.tables import Table
from hf_spec.methods.sdsat.infilling import Infilling

ORDERS = ("PSM", "SPM")
NEW_TOKENS = 32


@dataclass(frozen=True)
class Gap:
    """Masked line (`middle`), including its indentation, and the text around it."""

    name: str
    before: str
    middle: str
    after: str


def gaps(name: str, head: str, code: str, context: int) -> Iterator[Gap]:
    """Yield a gap per line of `code` that is not empty, a comment, or a bracket alone.

    Args:
        name: name of the text.
        head: text before the code.
        code: text that is masked line by line.
        context: maximum number of lines before and after the gap.
    """
    lines = code.splitlines()
    for number, line in enumerate(lines):
        if len(line.strip()) < 3 or line.strip().startswith("#"):
            continue
        before = [*head.splitlines(), *lines[:number]][-context:]
        after = lines[number + 1 :][:context]
        before_text = "".join(f"{one}\n" for one in before)
        after_text = "".join(f"\n{one}" for one in after)
        yield Gap(f"{name}:{number + 1}", before_text, line.rstrip(), after_text)


def read_gaps(options: argparse.Namespace) -> list[Gap]:
    """Return every `options.every`-th gap of the files given on the command line."""
    found: list[Gap] = []
    for problem in task_quality.read(options.human_eval) if options.human_eval else []:
        texts = problem["prompt"], problem["canonical_solution"]
        found += gaps(problem["task_id"], *texts, options.context)
    for path in options.python:
        found += gaps(path.name, "", path.read_text(encoding="utf-8"), options.context)
    return found[:: options.every][: options.num_gaps]


def arranged(infilling: Infilling, gap: Gap, order: str) -> Tensor:
    """Return the (1, L) ids that a model reads to fill a gap."""
    encode = infilling.tokenizer
    before, after = (
        encode(part, add_special_tokens=False)["input_ids"] for part in (gap.before, gap.after)
    )
    prefix, suffix, middle = infilling.prefix, infilling.suffix, infilling.middle
    if order == "PSM":
        return torch.tensor([[prefix, *before, suffix, *after, middle]])
    return torch.tensor([[prefix, suffix, *after, middle, *before]])


def fill(model: Any, infilling: Infilling, gap: Gap, order: str, gated: str | None) -> Any:
    """Return True if the line equals the masked one, the line itself, and the accepted tokens."""
    ids = arranged(infilling, gap, order).to(model.device)
    method = {"spec_strategy": "sdsat", "assistant": gated} if gated else {"spec_strategy": "none"}
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        **method,
    )
    answer = output.sequences[0, ids.shape[1] :]
    line = infilling.tokenizer.decode(answer, skip_special_tokens=True).split("\n")[0].rstrip()
    stats = output.spec_stats
    return {
        "gap": gap.name,
        "order": order,
        "right": line == gap.middle,
        "line": line,
        "new_tokens": len(answer),
        "target_forwards": stats.target_forwards,
        "accepted": stats.accepted_tokens,
    }


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return Markdown: per model the exact matches of each order and the accepted tokens."""
    rows = []
    for name, records in results.items():
        cells = [name]
        for order in ORDERS:
            right = [record["right"] for record in records if record["order"] == order]
            share = f" ({sum(right) / len(right):.1%})" if right else ""
            cells.append(f"{sum(right)} of {len(right)}{share}")
        forwards = sum(record["target_forwards"] for record in records)
        accepted = sum(record["accepted"] for record in records)
        rows.append([*cells, f"{accepted / forwards:.2f}" if accepted else "-"])
    return Table(["model", *ORDERS, "tau"], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the base: folder or Hub id")
    parser.add_argument("--adapter", action="append", default=[], help="of mode lora")
    parser.add_argument("--tuned", action="append", default=[], help="a fine-tuned model")
    parser.add_argument("--gated", action="append", default=[], help="of mode gated or embeddings")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--python", type=Path, nargs="+", default=[], help="Python files")
    parser.add_argument("--context", type=int, default=40, help="lines before and after a gap")
    parser.add_argument("--every", type=int, default=1, help="take every N-th line")
    parser.add_argument("--num-gaps", type=int, help="the first N of these")
    parser.add_argument("--markers", nargs=3, default=(), help="default: the tokenizer's")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    found = read_gaps(options)
    settings = {"every": options.every, "context": options.context, "dtype": options.dtype}
    records = timing.gone_on(options.out, settings)
    infilling = Infilling.of(AutoTokenizer.from_pretrained(options.model), options.markers)
    loaded = task_quality.models(options.model, options.adapter, options.tuned, (), options.dtype)
    facts = {"environment": environment(), "model": timing.shown(options.model), **settings}
    for number, (name, model) in enumerate(loaded):
        # Gated adapters change only the drafts.
        for gated in [None, *options.gated] if number == 0 else [None]:
            label = Path(gated).name if gated else name
            known = {(r["gap"], r["order"]) for r in records if r["model"] == label}
            for gap in found:
                for order in ORDERS:
                    if (gap.name, order) not in known:
                        result = fill(model, infilling, gap, order, gated)
                        records.append({"model": label, **result})
                if options.out:
                    write_json(options.out, {**facts, "records": records})
    names = dict.fromkeys(record["model"] for record in records)
    print(table({name: [r for r in records if r["model"] == name] for name in names}))


if __name__ == "__main__":
    main()
