"""lm-evaluation-harness with a stored strategy beside plain decoding: scores and processor seconds.

    python -m examples.studies.integrations.lm_eval_speed --batch-sizes 1
    python -m examples.studies.integrations.lm_eval_speed --batch-sizes 8 --repeats 2 --add

Twenty sums in words (`sums.jsonl`), twelve of one step, which the model can do, asked as GSM8K is:
examples with their reasoning first, the number after `####` is compared. SmolLM2-135M-Instruct in
float32, one thread; its Falcon head in `examples/adapters` at batch size 1. Time is that of the
process, so that others matter less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from hf_spec.common.machine import environment

ITEMS = Path(__file__).with_name("sums.jsonl")
NEW_TOKENS = 48
STRATEGIES = (None, "lookup", "auto", "falcon")
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
    """What one run of the harness says: the share that is right, all answers, and its seconds."""

    score: float
    answers: list[str]
    seconds: float


def task() -> dict[str, Any]:
    """The task as the harness takes it; two items are shown with every question."""
    return {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(ITEMS)}},
        "test_split": "test",
        "fewshot_config": {"sampler": "first_n", "samples": SHOWN},
        "num_fewshot": len(SHOWN),
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{reasoning}} #### {{answer}}",
        "target_delimiter": " ",
        "generation_kwargs": {
            "until": ["Question:", "\n\n"],
            "do_sample": False,
            "max_gen_toks": NEW_TOKENS,
        },
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


def evaluate(
    model: Any, tokenizer: Any, strategy: Any, batch_size: int, items: int | None = None
) -> Evaluation:
    """Run the task with a strategy stored in the model's generation config; None is plain."""
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

    # What the harness does around it takes some seconds, whoever generates.
    judged.generate_until = timed
    found: Any = simple_evaluate(judged, tasks=[task()], limit=items, bootstrap_iters=0)
    model.generation_config.spec_strategy = model.generation_config.assistant = None
    samples = sorted(found["samples"]["sums"], key=lambda sample: sample["doc_id"])
    score = found["results"]["sums"]["exact_match,number"]
    return Evaluation(score, [sample["resps"][0][0] for sample in samples], seconds)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("lm_eval.json"))
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--add", action="store_true", help="to what the record has")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_spec.common.small_models import smollm2_135m_instruct

    torch.set_num_threads(1)
    folder = smollm2_135m_instruct()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    runs: list[dict[str, Any]] = []
    if options.add:
        runs = json.loads(options.out.read_text("utf-8"))["runs"]
    for size in options.batch_sizes:
        strategies = STRATEGIES if size == 1 else STRATEGIES[:-1]
        # Packing and the first measurements of costs belong to no run.
        for strategy in strategies[1:]:
            evaluate(model, tokenizer, strategy, size, 1)
        for _ in range(options.repeats):
            for strategy in strategies:
                found = evaluate(model, tokenizer, strategy, size, options.items)
                runs.append({"batch": size, "strategy": strategy or "plain", **vars(found)})
                print(size, strategy, f"{found.score:.2f} {found.seconds:.1f} s", flush=True)
            lines = table(runs)
            record = {"machine": environment(), "items": options.items, "table": lines}
            options.out.write_text(json.dumps({**record, "runs": runs}, indent=1))
    print(json.dumps(lines, indent=1))


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each batch size and strategy: times as ratios to plain of the same repeat."""
    lines = []
    for size in sorted({run["batch"] for run in runs}):
        here = [run for run in runs if run["batch"] == size]
        plain = [run for run in here if run["strategy"] == "plain"]
        for name in dict.fromkeys(run["strategy"] for run in here):
            mine = [run for run in here if run["strategy"] == name]
            pairs = list(zip(plain, mine, strict=True))
            ratios = sorted(one["seconds"] / other["seconds"] for one, other in pairs)
            equal = [one["answers"] == other["answers"] for one, other in pairs]
            lines.append(
                {
                    "batch": size,
                    "strategy": name,
                    "score": mine[0]["score"],
                    "same_answers": all(equal),
                    "speed": round(statistics.median(ratios), 3),
                    "least": round(ratios[0], 3),
                    "most": round(ratios[-1], 3),
                }
            )
    return lines


if __name__ == "__main__":
    main()
