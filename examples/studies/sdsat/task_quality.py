"""Whether a training of adaptive tokens made the model worse, on tasks that can be right or wrong.

Perplexity on a model's own answers says that a model is another one, not that it is a better one
(it falls with every training on such answers). So, as in tables 1 to 3 of Liu et al. 2024 (arXiv
2403.18647): word problems whose last number must be the right one (the format of GSM8K), and
functions that must pass their tests (the format of MBPP, pass@1, greedy), which are run in a
process of their own with limits (`sandbox.py`). The problems beside this file were written for it;
files in the format of the published sets can be given instead. Run as
`python -m examples.studies.sdsat.task_quality --help` says.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Container, Iterator, Sequence
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

MATH_PROMPT = "{question}\nThink step by step, and end with the number of the answer alone."
CODE_PROMPT = "{text}\nAnswer with Python code alone. It must pass this test:\n{test}"


def final_number(text: str) -> float | None:
    """The number after "####" if there is one, otherwise the last number of a text."""
    found = NUMBER.findall(text.rpartition("####")[2])
    return float(found[-1].replace(",", "")) if found else None


def code_of(text: str) -> str:
    """The first fenced block of an answer; all of it if there is none."""
    fenced = FENCED.search(text)
    return fenced[1] if fenced else text


def read(path: Path) -> list[dict[str, Any]]:
    """The problems of a file of JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


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
    math: Sequence[dict[str, Any]],
    code: Sequence[dict[str, Any]],
    new_tokens: int,
) -> Iterator[dict[str, Any]]:
    """A record per problem: its kind, whether the answer is right, and the answer itself."""
    for number, problem in enumerate(tqdm(math, desc="math", disable=None)):
        said = answer(model, tokenizer, MATH_PROMPT.format(**problem), new_tokens)
        yield {"kind": "math", "number": number, **judged_math(problem, said), "said": said}
    for number, problem in enumerate(tqdm(code, desc="code", disable=None)):
        text = CODE_PROMPT.format(text=problem["text"], test=problem["test_list"][0])
        said = answer(model, tokenizer, text, new_tokens)
        found = judged_code(problem, said, Limits())
        yield {"kind": "code", "number": number, **found, "said": said}


def shares(records: Sequence[dict[str, Any]]) -> list[str]:
    """How many of the problems of each kind have right answers, in the order of `SHARES`."""
    right = [[one["right"] for one in records if one["kind"] == kind] for kind in SHARES.values()]
    return [f"{sum(of_kind)} of {len(of_kind)}" for of_kind in right]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: per model the share of right answers of each kind."""
    rows = [[name, *shares(records)] for name, records in results.items()]
    return Table(["model", *SHARES], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the table and writes every answer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the base: folder or Hub id")
    parser.add_argument("--adapter", action="append", default=[], help="of SDSAT; may be repeated")
    parser.add_argument("--tuned", action="append", default=[], help="a fine-tuned model, likewise")
    parser.add_argument("--math", type=Path, default=PROBLEMS / "math.jsonl", help="as GSM8K's")
    parser.add_argument("--code", type=Path, default=PROBLEMS / "code.jsonl", help="as MBPP's")
    parser.add_argument("--num-problems", type=int, help="the first so many of each; all otherwise")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, help="JSON file; models that it knows are left out")
    options = parser.parse_args(argv)
    math, code = (read(path)[: options.num_problems] for path in (options.math, options.code))
    record = {"environment": environment(), "new_tokens": options.new_tokens, "results": {}}
    if options.out and options.out.exists():
        record = json.loads(options.out.read_text())
        if record["new_tokens"] != options.new_tokens:
            raise SystemExit(f"{options.out} has answers of {record['new_tokens']} tokens")
    results = record["results"]
    for name, model in models(options.model, options.adapter, options.tuned, results):
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        results[name] = list(judge(model, tokenizer, math, code, options.new_tokens))
        if options.out:
            write_json(options.out, record)
    print(table(results))


def models(
    base: str, adapters: Sequence[str], tuned: Sequence[str], known: Container[str] = ()
) -> Iterator[tuple[str, PreTrainedModel]]:
    """The base, and what each training made of it, by the last part of its name.

    Those that are `known` are left out. Adapters of the modes "gated" and "embeddings" change
    nothing that is answered, so they are refused.
    """

    def load(name: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()

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
