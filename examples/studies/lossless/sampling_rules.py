"""Compare the published sampling rules of GSD and SDSAT with exact ones: tokens, speed, quality.

Both rules accept more draft tokens than exact verification and change the distribution of the
output (Gong et al. 2024, arXiv 2407.16207, tables 2, 9, and 10; Liu et al. 2024, arXiv 2403.18647,
table 4). Every prompt is answered by plain `generate()` and by each strategy with both rules, at
every temperature and seed. Quality: the mean log-probability of the answer's tokens under the
target at the same temperature, and the share of correct answers to problems with tests or numbers.

    python -m examples.studies.lossless.sampling_rules --model TARGET --gsd DRAFT --out RECORD.json
    python -m examples.studies.lossless.sampling_rules --model TARGET --sdsat ADAPTER \
        --temperatures 0 0.2 1 --top-k 10 --top-p 0.95 --out RECORD.json

The record is written after every prompt, and the same command resumes it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from examples.studies import timing
from examples.studies.sdsat import task_quality
from hf_spec import GsdConfig, SdsatConfig
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.common.tables import Table
from hf_spec.drafting.config import StrategyConfig
from hf_spec.evaluation.bench.contenders import Settings, plain, strategy
from hf_spec.evaluation.bench.runner import rotated
from hf_spec.methods.draft_model.loading import resolve_draft_model

PLAIN = "plain"
EXACT, LOSSY = "exact", "lossy"


@dataclass(frozen=True)
class Question:
    """A prompt of (1, L) ids, and a function that judges its answers, if they can be judged."""

    id: str
    ids: Tensor
    is_right: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class Method:
    """A strategy; `config` has a field `lossy` that selects the rule."""

    name: str
    config: StrategyConfig
    assistant: Any


def gsd_methods(draft: Any, thresholds: Sequence[float], max_nodes: int) -> list[Method]:
    """Return the paper's SSD, TSD, and GSD with the same pruning, depth, and exit rule."""
    every = 10_000
    common = GsdConfig(
        length_policy="static",
        min_probability=thresholds[0],
        min_sibling_ratio=thresholds[1],
        max_nodes=max_nodes,
        max_draft_nodes=every,
        expanded_per_level=every,
    )
    shapes = {"SSD": (1, None), "TSD": (4, None), "GSD": (4, 1)}
    return [
        Method(name, replace(common, children=children, merge_length=length), draft)
        for name, (children, length) in shapes.items()
    ]


def sdsat_methods(adapter: str, lengths: Sequence[int], trees: Sequence[int]) -> list[Method]:
    """Return chains of `lengths` and the published trees of depths `trees`."""
    chains = [Method(f"chain {k}", SdsatConfig(num_adaptive=k), adapter) for k in lengths]
    return chains + [Method(f"tree {k}", SdsatConfig(tree=f"sdsat-{k}"), adapter) for k in trees]


def with_rules(methods: Sequence[Method], temperature: float) -> list[tuple[str, Method]]:
    """Return every method with both rules; greedy decoding has only the exact one."""
    rules = (EXACT, LOSSY) if temperature else (EXACT,)
    return [
        (rule, replace(one, config=replace(one.config, lossy=rule == LOSSY)))  # type: ignore[call-arg]
        for one, rule in product(methods, rules)
    ]


def read_questions(options: argparse.Namespace, tokenizer: Any) -> list[Question]:
    """Return the prompts and problems of the command line."""
    found = []
    if options.per_task:
        prompts = load_prompts(options.prompts, options.per_task, options.tasks)
        found += [Question(prompt.id, prompt.encode(tokenizer)) for prompt in prompts]
    for kind in ("math", "code", task_quality.HUMAN_EVAL):
        path = getattr(options, kind)
        problems = task_quality.read(path)[: options.num_problems] if path else []
        for number, problem in enumerate(problems):
            ids = Prompt("", "", (task_quality.question(kind, problem),)).encode(tokenizer)
            judge = partial(_is_right, kind, problem)
            found.append(Question(f"{kind}-{number}", ids, judge))
    return found


def _is_right(kind: str, problem: dict[str, Any], text: str) -> bool:
    right: bool = task_quality.judged(kind, problem, text)["right"]
    return right


@torch.no_grad()
def log_probability(model: Any, ids: Tensor, answer: Sequence[int], temperature: float) -> float:
    """Return the mean log-probability in nats of the tokens of an answer under the target."""
    whole = torch.cat([ids, torch.tensor([answer])], dim=1).to(model.device)
    logits = model(whole).logits[0, ids.shape[1] - 1 : -1].float()
    log_probs = (logits / (temperature or 1)).log_softmax(dim=-1)
    return float(log_probs[torch.arange(len(answer)), list(answer)].mean())


def measure(
    model: Any,
    tokenizer: Any,
    methods: Sequence[Method],
    question: Question,
    options: argparse.Namespace,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[dict[str, Any]]:
    """Yield a record per temperature, seed, method, and rule of one question."""
    for temperature, seed in product(options.temperatures, range(options.seeds)):
        if seed and not temperature:
            continue
        given: Settings = {"do_sample": False}
        if temperature:
            given = {"do_sample": True, "temperature": temperature}
            given |= {"top_k": options.top_k, "top_p": options.top_p}
        runs = [(PLAIN, "", plain(model, given))]
        for rule, one in with_rules(methods, temperature):
            runs.append((one.name, rule, strategy(model, one.config, one.assistant, None, given)))
        for name, rule, contender in rotated(runs, seed):
            torch.manual_seed(seed)
            begun = clock()
            run = contender.run(question.ids, options.new_tokens, torch.ones_like(question.ids))
            seconds = clock() - begun
            answer = run.sequence[question.ids.shape[1] :].tolist()
            text = tokenizer.decode(answer, skip_special_tokens=True)
            stats = run.stats
            yield {
                "question": question.id,
                "temperature": temperature,
                "seed": seed,
                "method": name,
                "rule": rule,
                "seconds": seconds,
                "new_tokens": len(answer),
                "target_forwards": run.target_forwards,
                "accepted": stats.accepted_tokens if stats else 0,
                "sent": stats.drafted_tokens if stats else 0,
                "rounds": stats.rounds if stats else 0,
                "counters": dict(stats.counters) if stats else {},
                "log_probability": log_probability(model, question.ids, answer, temperature),
                "right": question.is_right and question.is_right(text),
            }


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per temperature, method, and rule, with differences from plain `generate()`."""

    def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return record["temperature"], record["question"], record["seed"]

    reference = {key(r): r for r in records if r["method"] == PLAIN}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["temperature"], record["method"], record["rule"]), []).append(
            record
        )
    rows = []
    for (temperature, method, rule), mine in groups.items():
        pairs = [(reference[key(r)], r) for r in mine]
        # Seeds of one question are not independent of each other.
        gains: dict[str, list[float]] = {}
        for of, r in pairs:
            gain = r["log_probability"] - of["log_probability"]
            gains.setdefault(r["question"], []).append(gain)
        by_question = [fmean(found) for found in gains.values()]
        deviation = stdev(by_question) if len(by_question) > 1 else 0.0
        rounds = sum(r["rounds"] for r in mine)
        drafted = sum(r["counters"].get("draft_nodes", r["sent"]) for r in mine)
        tokens = sum(r["new_tokens"] for r in mine)
        judged = [r["right"] for r in mine if r["right"] is not None]
        seconds = [
            sum(r["seconds"] / r["new_tokens"] for r in side) for side in zip(*pairs, strict=True)
        ]
        rows.append(
            {
                "temperature": temperature,
                "method": method,
                "rule": rule,
                "answers": len(mine),
                "accepted": sum(r["accepted"] for r in mine) / tokens,
                "tau": sum(r["accepted"] for r in mine) / rounds if rounds else None,
                "drafted": drafted / rounds if rounds else None,
                "speed": seconds[0] / seconds[1],
                "log_probability": fmean(r["log_probability"] for r in mine),
                "gain": fmean(by_question),
                "gain_error": deviation / sqrt(len(by_question)),
                "right": sum(judged),
                "judged": len(judged),
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]], with_speed: bool = True) -> str:
    """Return a summary as Markdown."""

    def figure(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: "-" if row[name] is None else format(row[name], form)

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "temperature": figure("temperature", "g"),
        "": figure("method", ""),
        "rule": figure("rule", ""),
        "accepted share of tokens": figure("accepted", ".1%"),
        "tau": figure("tau", ".2f"),
        "drafted per round": figure("drafted", ".1f"),
        "speed over plain": figure("speed", ".2f"),
        "log-probability per token, nats": figure("log_probability", ".3f"),
        "difference to plain (standard error)": lambda row: (
            f"{row['gain']:+.3f} ({row['gain_error']:.3f})" if row["method"] != PLAIN else "-"
        ),
        "right": lambda row: f"{row['right']} of {row['judged']}" if row["judged"] else "-",
    }
    if not with_speed:
        del columns["speed over plain"]
    return Table.of(columns, rows).markdown()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `timing` and of the workload."""
    timing.add_options(parser)
    drafts = parser.add_mutually_exclusive_group(required=True)
    drafts.add_argument("--gsd", metavar="DRAFT", help="SSD, TSD, and GSD with this draft model")
    drafts.add_argument("--sdsat", metavar="ADAPTER", help="chains and trees of adaptive tokens")
    parser.add_argument("--thresholds", type=float, nargs=2, default=[0.2, 0.3], help="of --gsd")
    parser.add_argument("--max-nodes", type=int, default=100, help="verified per round, --gsd")
    parser.add_argument("--num-adaptive", type=int, nargs="*", default=[5], help="of --sdsat")
    parser.add_argument("--trees", type=int, nargs="*", default=[5, 7, 9, 11, 13])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7])
    parser.add_argument("--top-k", type=int, default=0, help="0 for all tokens")
    parser.add_argument("--top-p", type=float, default=0.7)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: the package's 60")
    parser.add_argument("--tasks", nargs="+", default=[], help="only prompts of these")
    parser.add_argument("--per-task", type=int, default=2, help="prompts of each; 0 for none")
    parser.add_argument("--code", type=Path, help="problems in the format of MBPP")
    parser.add_argument("--math", type=Path, help="problems in the format of GSM8K")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--num-problems", type=int, help="the first N of each file")
    parser.add_argument("--seconds", type=float, help="start no further prompt after this time")
    parser.add_argument("--no-speed", action="store_true", help="leave speed out of the table")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_args(argv)
    end = time.monotonic() + (options.seconds or float("inf"))
    names = ("gsd", "sdsat", "thresholds", "max_nodes", "num_adaptive", "trees", "temperatures")
    names = (*names, "dtype", "top_k", "top_p", "seeds", "new_tokens")
    settings = {name: getattr(options, name) for name in names}
    settings |= {n: settings[n] and timing.shown(settings[n]) for n in ("gsd", "sdsat")}
    records = timing.gone_on(options.out, settings)
    model, clock = timing.begin(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.gsd:
        draft = resolve_draft_model("gsd", options.gsd, model)
        methods = gsd_methods(draft, options.thresholds, options.max_nodes)
    else:
        methods = sdsat_methods(options.sdsat, options.num_adaptive, options.trees)
    known = {record["question"] for record in records}
    for question in read_questions(options, tokenizer):
        if question.id in known:
            continue
        if time.monotonic() > end:
            break
        records += measure(model, tokenizer, methods, question, options, clock)
        facts = {"model": timing.shown(options.model), **settings}
        timing.write_record(options, {**facts, "summary": summary(records), "records": records})
        print(f"{len({r['question'] for r in records})} questions", flush=True)
    print(table(summary(records), not options.no_speed))


if __name__ == "__main__":
    main()
