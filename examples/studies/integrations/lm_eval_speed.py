"""Compare lm-evaluation-harness with and without a stored strategy: scores and processor time.

    python -m examples.studies.integrations.lm_eval_speed --batch-sizes 1
    python -m examples.studies.integrations.lm_eval_speed --batch-sizes 8 --repeats 2 --add
    python -m examples.studies.integrations.lm_eval_speed --model MODEL --dtype bfloat16 \
        --threads 2 --tasks sums functions --new-tokens 96 --out lm_eval_coder.json

Tasks: `sums` are twenty word problems (`sums.jsonl`) in the format of GSM8K, with worked examples;
the number after `####` is compared. `functions` are twenty Python functions (`functions.jsonl`)
from signature and docstring, as in HumanEval; they run in a separate process and must pass all
tests. Defaults: SmolLM2-135M-Instruct in float32, one thread, with its Falcon head in
`examples/adapters` at batch size 1. Processor time is measured, so that other processes matter
less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from examples.studies.models import load_model
from hf_spec.common.machine import environment

SUMS, FUNCTIONS = TASKS = ("sums", "functions")
NEW_TOKENS = 48
STRATEGIES = ("lookup", "auto")
# Time limit of a generated function, which may not terminate.
LONGEST_SECONDS = 10
HEAD = Path(__file__).parents[2] / "adapters" / "smollm2-135m-falcon"
SHOWN = [
    {
        "question": "A hen lays 5 eggs a week. How many eggs do 4 hens lay in 2 weeks?",
        "reasoning": "In a week 4 hens lay 4 * 5 = 20 eggs. In 2 weeks they lay 2 * 20 = 40.",
        "answer": "40",
    },
    {
        "question": "Jo has 50 coins and buys 3 cups for 12 coins each. How many coins are left?",
        "reasoning": "The cups cost 3 * 12 = 36 coins. Left are 50 - 36 = 14.",
        "answer": "14",
    },
]


@dataclass(frozen=True)
class Evaluation:
    """Result of one run of the harness: score, answers, and processor seconds of generation."""

    score: float
    answers: list[str]
    seconds: float


def items_of(name: str) -> Path:
    """Return the file with the items of a task."""
    return Path(__file__).with_name(f"{name}.jsonl")


def task(name: str, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Return a task config of the harness."""
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(items_of(name))}},
        "test_split": "test",
        "output_type": "generate_until",
    }
    return common | (_sums if name == SUMS else _functions)(new_tokens)


def _sums(new_tokens: int) -> dict[str, Any]:
    """Return the options of `sums`, with two worked examples per question."""
    return {
        "fewshot_config": {"sampler": "first_n", "samples": SHOWN},
        "num_fewshot": len(SHOWN),
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{reasoning}} #### {{answer}}",
        "target_delimiter": " ",
        "generation_kwargs": _greedy(["Question:", "\n\n"], new_tokens),
        "filter_list": [
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": "#### (-?[0-9]+)"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "regexes_to_ignore": [r"(?s).*#### "],
                "higher_is_better": True,
            }
        ],
    }


def _functions(new_tokens: int) -> dict[str, Any]:
    """Return the options of `functions`, with the stop strings of HumanEval."""
    stops = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"]
    return {
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "",
        "generation_kwargs": _greedy(stops, new_tokens),
        "process_results": lambda item, texts: {"exact_match": passes(item, texts[0])},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def _greedy(stops: list[str], new_tokens: int) -> dict[str, Any]:
    return {"until": stops, "do_sample": False, "max_gen_toks": new_tokens}


def passes(item: dict[str, Any], text: str) -> bool:
    """Return True if a completed function passes its tests in a separate process."""
    code = "\n".join([item["prompt"] + text, *(f"assert {test}" for test in item["tests"])])
    try:
        command = [sys.executable, "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, timeout=LONGEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def evaluate(
    model: Any,
    tokenizer: Any,
    strategy: Any,
    batch_size: int,
    items: int | None = None,
    asked: dict[str, Any] | None = None,
) -> Evaluation:
    """Run a task (default: `sums`) with a strategy stored in the model's generation config.

    The strategy None is plain decoding.
    """
    asked = asked or task(SUMS)
    model.generation_config.spec_strategy = strategy
    model.generation_config.assistant = str(HEAD) if strategy == "falcon" else None
    judged: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    works, seconds = judged.generate_until, 0.0

    def timed(*given: Any, **named: Any) -> Any:
        nonlocal seconds
        start = time.process_time()
        answers = works(*given, **named)
        seconds += time.process_time() - start
        return answers

    # Time generation only: the rest of the harness takes the same seconds with any strategy.
    judged.generate_until = timed
    found: Any = simple_evaluate(judged, tasks=[asked], limit=items, bootstrap_iters=0)
    model.generation_config.spec_strategy = model.generation_config.assistant = None
    samples = sorted(found["samples"][asked["task"]], key=lambda sample: sample["doc_id"])
    scores = found["results"][asked["task"]]
    score = next(scores[name] for name in scores if name.startswith("exact_match,"))
    return Evaluation(score, [sample["resps"][0][0] for sample in samples], seconds)


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=[SUMS], choices=TASKS)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("lm_eval.json"))
    parser.add_argument("--items", type=int, default=20, help="of a task")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--add", action="store_true", help="to what the record has")
    options = parser.parse_args(argv)
    from hf_spec.common.small_models import smollm2_135m_instruct

    torch.set_num_threads(options.threads)
    folder = options.model or smollm2_135m_instruct()
    model, tokenizer = load_model(folder, options.dtype)
    runs: list[dict[str, Any]] = []
    if options.add:
        runs = json.loads(options.out.read_text("utf-8"))["runs"]
    for name, size in ((name, size) for name in options.tasks for size in options.batch_sizes):
        asked = task(name, options.new_tokens)
        heads = ["falcon"] if size == 1 and options.model is None else []
        strategies = [None, *options.strategies, *heads]
        # A warm-up call packs weights and measures round costs.
        for strategy in strategies[1:]:
            evaluate(model, tokenizer, strategy, size, 1, asked)
        for _ in range(options.repeats):
            for strategy in strategies:
                found = evaluate(model, tokenizer, strategy, size, options.items, asked)
                run = {"task": name, "batch": size, "strategy": strategy or "plain"}
                runs.append({**run, **vars(found)})
                print(name, size, strategy, f"{found.score:.2f} {found.seconds:.1f} s", flush=True)
            lines = table(runs)
            facts = {"model": Path(folder).name, "dtype": options.dtype, "items": options.items}
            facts |= {"threads": options.threads, "new_tokens": options.new_tokens}
            record = {"machine": environment(), **facts, "table": lines, "runs": runs}
            options.out.write_text(json.dumps(record, indent=1))
    print(json.dumps(lines, indent=1))


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per task, batch size, and strategy, with speedups over plain in each repeat."""
    lines = []
    for asked, size in sorted({(run.get("task", SUMS), run["batch"]) for run in runs}):
        here = [run for run in runs if (run.get("task", SUMS), run["batch"]) == (asked, size)]
        plain = [run for run in here if run["strategy"] == "plain"]
        for name in dict.fromkeys(run["strategy"] for run in here):
            mine = [run for run in here if run["strategy"] == name]
            pairs = list(zip(plain, mine, strict=True))
            ratios = sorted(one["seconds"] / other["seconds"] for one, other in pairs)
            same = [
                a == b for p, m in pairs for a, b in zip(p["answers"], m["answers"], strict=True)
            ]
            lines.append(
                {
                    "task": asked,
                    "batch": size,
                    "strategy": name,
                    "score": mine[0]["score"],
                    "same_answers": f"{sum(same)} of {len(same)}",
                    "speed": round(statistics.median(ratios), 3),
                    "least": round(ratios[0], 3),
                    "most": round(ratios[-1], 3),
                }
            )
    return lines


if __name__ == "__main__":
    main()
