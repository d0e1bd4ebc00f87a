"""Effect of training adaptive tokens on task accuracy.

Perplexity on a model's own answers shows that a model changed, not that it improved: it falls with
any training on such answers. As in tables 1 to 3 of Liu et al. 2024 (arXiv 2403.18647), this study
uses math word problems and functions. The last number of a word problem must be correct (GSM8K
format). A function must pass its tests (MBPP format, pass@1, greedy), which run in a separate
process with limits (`sandbox.py`). The problems in this folder were written for this study. Files
in the format of the published sets can be used instead, and HumanEval in addition. The record is
written after every problem, and the same command resumes an interrupted run. For usage, run
`python -m examples.studies.sdsat.task_quality --help`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from examples.studies.sdsat.sandbox import Limits, run_program
from hf_spec.adapters.folder import load_adapter
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt
from hf_spec.common.tables import Table
from hf_spec.methods.sdsat.adaptive_tokens import METHOD, merge_lora

PROBLEMS = Path(__file__).with_name("problems")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Metric -> kind of problem.
HUMAN_EVAL = "human_eval"
SHARES = {"accuracy, math": "math", "pass@1, code": "code", "pass@1, HumanEval": HUMAN_EVAL}

MATH_PROMPT = "{question}\nThink step by step, and end with the number of the answer alone."
CODE_PROMPT = "{text}\nAnswer with Python code alone. It must pass this test:\n{test}"
HUMAN_EVAL_PROMPT = "Complete the following Python function.\n\n```python\n{prompt}```"


def final_number(text: str) -> float | None:
    """Return the number after "####" if there is one, otherwise the last number of a text."""
    found = NUMBER.findall(text.rpartition("####")[2])
    return float(found[-1].replace(",", "")) if found else None


def code_of(text: str) -> str:
    """Return the first fenced block of an answer, or the whole answer if there is none."""
    fenced = FENCED.search(text)
    return fenced[1] if fenced else text


def read(path: Path) -> list[dict[str, Any]]:
    """Return the problems of a JSON lines file, which may be gzip-compressed."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def question(kind: str, problem: Mapping[str, Any]) -> str:
    """Return the prompt of a problem."""
    if kind == "math":
        return MATH_PROMPT.format(**problem)
    if kind == HUMAN_EVAL:
        return HUMAN_EVAL_PROMPT.format(**problem)
    return CODE_PROMPT.format(text=problem["text"], test=problem["test_list"][0])


def judged(kind: str, problem: dict[str, Any], said: str) -> dict[str, Any]:
    """Return a dict with "right", True if the answer is correct, and details."""
    if kind == "math":
        return judged_math(problem, said)
    if kind == HUMAN_EVAL:
        return {"right": passes(problem, said)}
    return judged_code(problem, said, Limits())


def passes(problem: dict[str, Any], said: str) -> bool:
    """Return True if the code of an answer passes the tests of a HumanEval problem."""
    # The prompt contains imports and helpers that the answer may omit.
    parts = [problem["prompt"] + "    pass", code_of(said), problem["test"]]
    check = f"check({problem['entry_point']})"
    return run_program("\n\n".join([*parts, check])).passed


def judged_math(problem: dict[str, Any], said: str) -> dict[str, Any]:
    """Return "right": True if the final number equals that of the solution."""
    return {"right": final_number(said) == final_number(problem["answer"])}


def judged_code(problem: dict[str, Any], said: str, limits: Limits) -> dict[str, Any]:
    """Return the result of running the tests of the problem on the code in the sandbox."""
    setup = problem.get("test_setup_code", "")
    outcome = run_program("\n".join([setup, code_of(said), *problem["test_list"]]), limits)
    return {"right": outcome.passed, "reason": outcome.reason, "network": outcome.network}


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """Return the greedy answer of a model; lookup is lossless, and saves half of the time."""
    ids = Prompt("", "", (prompt,)).encode(tokenizer).to(model.device)
    generated: torch.Tensor = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, spec_strategy="lookup"
    )
    said: str = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
    return said


def judge(
    model: PreTrainedModel,
    tokenizer: Any,
    problems: Mapping[str, Sequence[dict[str, Any]]],
    new_tokens: int,
    known: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield a record per problem with its kind, the verdict, and the answer itself.

    Args:
        model: model to evaluate.
        tokenizer: tokenizer of the model.
        problems: kind -> problems.
        new_tokens: maximum number of tokens of an answer.
        known: number of problems to skip, from the first.
    """
    numbered = [(kind, n, one) for kind, found in problems.items() for n, one in enumerate(found)]
    for kind, number, problem in tqdm(numbered[known:], desc="problems", disable=None):
        said = answer(model, tokenizer, question(kind, problem), new_tokens)
        yield {"kind": kind, "number": number, **judged(kind, problem, said), "said": said}


def shares(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the number of correct answers by metric, see `SHARES`."""
    return {metric: _share(records, kind) for metric, kind in SHARES.items()}


def _share(records: Sequence[dict[str, Any]], kind: str) -> str:
    right = [one["right"] for one in records if one["kind"] == kind]
    return f"{sum(right)} of {len(right)}" if right else "-"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return Markdown: per model, the correct answers of each kind in the records."""
    asked = {one["kind"] for records in results.values() for one in records}
    metrics = [metric for metric, kind in SHARES.items() if kind in asked]
    found = {name: shares(records) for name, records in results.items()}
    rows = [[name, *(share[metric] for metric in metrics)] for name, share in found.items()]
    return Table(["model", *metrics], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line, print the table, and write every answer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the base: folder or Hub id")
    parser.add_argument("--adapter", action="append", default=[], help="of SDSAT; may be repeated")
    parser.add_argument("--tuned", action="append", default=[], help="a fine-tuned model, likewise")
    parser.add_argument("--math", type=Path, default=PROBLEMS / "math.jsonl", help="as GSM8K's")
    parser.add_argument("--code", type=Path, default=PROBLEMS / "code.jsonl", help="as MBPP's")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--num-problems", type=int, help="only the first N of each kind")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, help="JSON file; answers that it knows are left out")
    options = parser.parse_args(argv)
    files = {"math": options.math, "code": options.code, HUMAN_EVAL: options.human_eval}
    problems = {kind: read(path)[: options.num_problems] for kind, path in files.items() if path}
    total = sum(map(len, problems.values()))
    record = {"environment": environment(), "new_tokens": options.new_tokens, "results": {}}
    if options.out and options.out.exists():
        record = json.loads(options.out.read_text())
        if record["new_tokens"] != options.new_tokens:
            raise SystemExit(f"{options.out} has answers of {record['new_tokens']} tokens")
    results = record["results"]
    done = [name for name, found in results.items() if len(found) >= total]
    named = models(options.model, options.adapter, options.tuned, done, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for name, model in named:
        records = results.setdefault(name, [])
        for one in judge(model, tokenizer, problems, options.new_tokens, len(records)):
            records.append(one)
            if options.out:
                write_json(options.out, record)
    print(table(results))


def models(
    base: str,
    adapters: Sequence[str],
    tuned: Sequence[str],
    known: Sequence[str] = (),
    dtype: str = "float32",
) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the base and each trained model, with the last part of its name.

    Models in `known` are skipped. Adapters of mode "gated" or "embeddings" raise an error, because
    they do not change the answers.
    """

    def load(name: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()

    loaded = {name: load_adapter(name, METHOD) for name in adapters}
    for name, adapter in loaded.items():
        mode = adapter.options.get("mode")
        if mode != "lora":
            raise SystemExit(f"{name} is of mode {mode!r}: its answers are those of the base")
    for name in (base, *adapters, *tuned):
        if Path(name).name in known:
            continue
        model = load(base if name in loaded else name)
        if name in loaded:
            merge_lora(model, loaded[name])
        yield Path(name).name, model


if __name__ == "__main__":
    main()
