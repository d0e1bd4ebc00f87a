"""Measure the speed of strategies and pass@1 on HumanEval, problem by problem.

    python -m examples.studies.real_models.human_eval --model TARGET --dtype bfloat16 \
        --problems HumanEval.jsonl.gz --strategy none --strategy lookup --strategy gsd@DRAFT \
        --out human_eval.json

The problems are those of OpenAI (github.com/openai/human-eval, MIT license); the Python package
human-eval also contains the file. Plain `generate()` and the strategies run in rotating order on
every problem. Problems are shuffled, so that an interrupted run is a fair sample. The record is
written after each problem, and the same command resumes it. Answers begin by copying the prompt,
which is easy to draft; with --after-copy, they begin after the copy. Generated programs run in
`examples.studies.sdsat.sandbox`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from examples.studies import timing
from examples.studies.full_table import by_prompt
from examples.studies.sdsat.task_quality import HUMAN_EVAL_PROMPT, passes, read
from hf_spec.common.prompts import Prompt
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench.contenders import Contender
from hf_spec.evaluation.bench.runner import rotated
from hf_spec.evaluation.lossless.mismatch import Difference, differences

# Start of an answer, which copies the prompt.
COPY = "```python\n{prompt}"
WARM_UP_TOKENS = 16


def encode(tokenizer: Any, problem: dict[str, Any], after_copy: bool) -> Tensor:
    """Return the (1, L) ids of a problem in the chat template, and optionally the copied prompt."""
    ids = Prompt("", "code", (HUMAN_EVAL_PROMPT.format(**problem),)).encode(tokenizer)
    if not after_copy:
        return ids
    copied = tokenizer(
        COPY.format(**problem).rstrip(), return_tensors="pt", add_special_tokens=False
    )
    return torch.cat([ids, copied.input_ids], dim=1)


def measure(
    model: Any,
    tokenizer: Any,
    contenders: Sequence[Contender],
    problem: dict[str, Any],
    turn: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Run every contender on a problem; return times, tokens, tau, answers, and differences."""
    new_tokens = options.new_tokens
    ids = encode(tokenizer, problem, options.after_copy)
    begun = COPY.format(**problem).rstrip() if options.after_copy else ""
    runs, results = dict[str, list[int]](), dict[str, dict[str, Any]]()
    for contender in rotated(contenders, turn):
        began = time.perf_counter()
        run = contender.run(ids, new_tokens, torch.ones_like(ids))
        seconds = time.perf_counter() - began
        runs[contender.name] = run.sequence.tolist()
        results[contender.name] = {
            "seconds": round(seconds, 4),
            "new_tokens": len(runs[contender.name]) - ids.shape[1],
            "tau": run.stats and round(run.stats.tau, 3),
        }
    plain = runs[contenders[0].name]
    checked = dict[tuple[int, ...], list[Difference]]()
    for contender in contenders:
        tokens, result = runs[contender.name], results[contender.name]
        text = begun + tokenizer.decode(tokens[ids.shape[1] :], skip_special_tokens=True)
        if (output := tuple(tokens)) not in checked:
            checked[output] = list(differences(model, ids, plain, tokens, new_tokens))
        result |= {
            "passed": passes(problem, text),
            "equals_none": tokens == runs.get("none"),
            "differences": [asdict(difference) for difference in checked[output]],
        }
        if contender is contenders[0]:
            result["answer"] = text
    return {"problem": problem["task_id"], "results": results}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: speed, tau, passed tests, and equal answers of each contender."""
    names = list(records[0]["results"])
    rows = []
    for name in names:
        mine = [record["results"][name] for record in records]
        taus = [result["tau"] for result in mine if result["tau"] is not None]
        kinds = [d["kind"] for result in mine for d in result["differences"]]
        rows.append(
            [
                name,
                _ratios(records, names[0], name),
                _ratios(records, "none", name) if "none" in names else "",
                f"{statistics.mean(taus):.2f}" if taus else "",
                f"{sum(result['passed'] for result in mine)} of {len(mine)}",
                f"{sum(not result['differences'] for result in mine)}",
                f"{kinds.count('tie')} / {len(kinds) - kinds.count('tie')}",
                f"{sum(result['equals_none'] for result in mine)}",
            ]
        )
    heads = ["", "over plain", "over `none`", "tau", "pass@1", "equal to plain"]
    return Table([*heads, "ties / mistakes", "equal to `none`"], rows).markdown()


def speedups(records: Sequence[dict[str, Any]], reference: str, name: str) -> list[float]:
    """Return the tokens per second of a contender relative to the reference, by problem."""
    pairs = [(r["results"][reference], r["results"][name]) for r in records]
    return [
        (of["seconds"] / of["new_tokens"]) / (mine["seconds"] / mine["new_tokens"])
        for of, mine in pairs
    ]


def _ratios(records: Sequence[dict[str, Any]], reference: str, name: str) -> str:
    """Return the ratio of the times over all problems, and the speedups' median and range."""
    each = speedups(records, reference, name)
    seconds = {n: sum(r["results"][n]["seconds"] for r in records) for n in (reference, name)}
    total = seconds[reference] / seconds[name]
    return f"{total:.2f}; {statistics.median(each):.2f} ({min(each):.2f} - {max(each):.2f})"


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every problem as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    timing.add_options(parser)
    parser.add_argument("--problems", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--strategy", action="append", required=True, help="as for `bench`")
    parser.add_argument("--assistant", action="append", default=[], help="as for `bench`")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--after-copy", action="store_true", help="begin after the copied prompt")
    parser.add_argument("--every", type=int, default=1, help="take every N-th problem")
    options = parser.parse_args(argv)
    problems = read(options.problems)[:: options.every]
    random.Random(0).shuffle(problems)  # noqa: S311 - no secret
    facts = {"model": timing.shown(options.model), "date": date.today().isoformat()}
    settings = {
        "dtype": options.dtype,
        "new_tokens": options.new_tokens,
        "after_copy": options.after_copy,
        "every": options.every,
        "strategies": [text.partition("@")[0] for text in options.strategy],
    }
    records = timing.gone_on(options.out, settings)
    model, _ = timing.begin(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    contenders = by_prompt.ours(model, options)
    first = encode(tokenizer, problems[0], options.after_copy)
    for contender in contenders:
        contender.run(first, WARM_UP_TOKENS, torch.ones_like(first))
    known = {record["problem"] for record in records}
    for turn, problem in enumerate(problems):
        if problem["task_id"] in known:
            continue
        records.append(measure(model, tokenizer, contenders, problem, turn, options))
        timing.write_record(options, {**facts, **settings, "records": records})
        print(f"{len(records)} of {len(problems)}", flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
