"""Transfer of a DISCO classifier to a task other than its training task.

As in the paper, a classifier trained on the MBPP training set is evaluated on HumanEval (Mamou et
al. 2024, arXiv 2405.04304, table 1). Greedy answers of the target to every set of prompts are
generated once; at each of their positions, the draft model predicts one token. For every training
set, the classifier, confidence threshold, and static length are chosen on part of its prompts, and
evaluated on another part and on all other sets. Nothing is timed: rounds are simulated on these
positions. The number of rounds equals that of `generate()`. Tokens drafted after a rejected one are
scored at the target's own text. Speed is estimated as tokens / (rounds + cost ratio * drafted
tokens). Answers and predictions are stored in a folder, and the same command resumes from it.

    python -m examples.studies.disco.transfer --model TARGET --assistant DRAFT --dtype bfloat16 \
        --train mbpp=MBPP.jsonl --judge human_eval=HUMAN_EVAL.jsonl --work FOLDER --out RECORD.json

Prompt files have the format of `hf-spec bench --prompts`, or are HumanEval.jsonl.gz. NAME=TASK
selects a task of the built-in prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.studies.disco.ablation import ranked_right
from examples.studies.disco.oracle_lengths import THRESHOLDS, f1
from examples.studies.models import load_model
from examples.studies.sdsat import task_quality
from examples.studies.timing import shown
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.common.tables import Table
from hf_spec.methods.disco.classifier import DiscoClassifier
from hf_spec.methods.disco.settings import DiscoTrainSettings
from hf_spec.methods.disco.training import Observed, fit, observe
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.training.held_out import split_by_seed
from hf_spec.training.responses import generate_responses, read_responses
from hf_spec.training.settings import ResponseSettings

LONGEST = (5, 8, 12, 20)
STATIC = tuple(range(1, 21))
# Share of the prompts of a training set that is held out for evaluation.
JUDGING = 0.2

# Score of each position of an answer; drafting ends after a token below the threshold.
Scores = Callable[[Observed], Tensor]


class Rule(NamedTuple):
    """Rule that ends a draft after a score below `threshold`, or after `longest` tokens."""

    threshold: float
    longest: int


@dataclass(frozen=True)
class Counts:
    """Number of rounds, drafted tokens, and all tokens of simulated answers."""

    rounds: int = 0
    drafted: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def speed(self, cost_ratio: float) -> float:
        """Return the estimated speedup over decoding without drafts."""
        return self.tokens / (self.rounds + cost_ratio * self.drafted)


def simulate(matched: Sequence[bool], continues: Sequence[bool], longest: int) -> Counts:
    """Return the counts of one answer.

    Args:
        matched: per position, True if the draft model predicts the target's token.
        continues: per position, True if drafting continues after its token.
        longest: maximum number of tokens of a draft.
    """
    position = rounds = drafted = 0
    while position < len(matched):
        # The last token of an answer is not drafted: every round has a bonus token.
        end = min(position + longest, len(matched) - 1)
        sent = position
        while sent < end:
            sent += 1
            if not continues[sent - 1]:
                break
        accepted = position
        while accepted < sent and matched[accepted]:
            accepted += 1
        rounds, drafted = rounds + 1, drafted + sent - position
        position = accepted + 1
    return Counts(rounds, drafted, len(matched))


def simulated(observed: Sequence[Observed], scores: Sequence[Tensor], rule: Rule) -> Counts:
    """Return the counts of all answers; `scores` has a score per position of each answer."""
    counts = Counts()
    for one, values in zip(observed, scores, strict=True):
        continues = (values >= rule.threshold).tolist()
        counts += simulate(one.matched.tolist(), continues, rule.longest)
    return counts


def best_rule(
    observed: Sequence[Observed], scores: Sequence[Tensor], rules: Sequence[Rule], cost: float
) -> Rule:
    """Return the rule with the highest estimated speed on these answers."""
    return max(rules, key=lambda rule: simulated(observed, scores, rule).speed(cost))


def parts(observed: Sequence[Observed], seed: int) -> tuple[list[Observed], ...]:
    """Split the answers of a training set into parts for training, choosing, and evaluation."""
    rest, judging = split_by_seed([one.id for one in observed], JUDGING, seed)
    share = DiscoTrainSettings().validation_share
    training, choosing = split_by_seed(list(rest), share, seed)
    return tuple(
        [one for one in observed if one.id in ids] for ids in (training, choosing, judging)
    )


def scorers(classifier: DiscoClassifier) -> dict[str, Scores]:
    """Return the score function of each kind of rule; static lengths ignore scores."""

    @torch.no_grad()
    def predict(one: Observed) -> Tensor:
        return classifier(one.features).sigmoid()

    return {
        "classifier": predict,
        "confidence": lambda one: one.features[:, 0],
        "static": lambda one: torch.ones_like(one.features[:, 0]),
    }


def judge(
    trained_on: str,
    train_parts: Sequence[list[Observed]],
    sets: Mapping[str, Sequence[Observed]],
    settings: DiscoTrainSettings,
    cost: float,
) -> list[dict[str, Any]]:
    """Train and choose on one set; return a row per evaluated set and kind of rule."""
    training, choosing, _ = train_parts
    classifier, _ = fit(training, choosing, settings)
    every = [Rule(*values) for values in product(THRESHOLDS, LONGEST)]
    rows = []
    for kind, score in scorers(classifier).items():
        rules = [Rule(0.0, length) for length in STATIC] if kind == "static" else every
        rule = best_rule(choosing, [score(one) for one in choosing], rules, cost)
        for name, observed in sets.items():
            values = [score(one) for one in observed]
            matched = torch.cat([one.matched for one in observed])
            together = torch.cat(values)
            counts = simulated(observed, values, rule)
            row = {"judged": name, "rule": kind, "trained_on": trained_on, **rule._asdict()}
            if kind != "static":
                row["f1_accepted"] = f1(together >= rule.threshold, matched)
                both = bool(matched.any()) and not bool(matched.all())
                row["ranked_right"] = ranked_right(together, matched) if both else None
            rows.append({**row, **asdict(counts), "speed": counts.speed(cost)})
    return rows


def oracles(sets: Mapping[str, Sequence[Observed]], cost: float) -> list[dict[str, Any]]:
    """Return, per set, the result of drafting exactly the accepted tokens."""
    rows = []
    for name, observed in sets.items():
        counts = Counts()
        for one in observed:
            matched = one.matched.tolist()
            rounds = simulate(matched, matched, len(matched)).rounds
            # The oracle does not draft the rejected token of each round.
            counts += Counts(rounds, len(matched) - rounds, len(matched))
        row = {"judged": name, "rule": "oracle", "trained_on": "-", **asdict(counts)}
        rows.append({**row, "speed": counts.speed(cost)})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return all rows as a Markdown table, set by set."""

    def figure(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: "-" if row.get(name) is None else format(row[name], form)

    columns = {
        "judged on": figure("judged", ""),
        "rule": figure("rule", ""),
        "trained on": figure("trained_on", ""),
        "threshold": figure("threshold", ".2f"),
        "longest": figure("longest", ""),
        "F1 accepted": figure("f1_accepted", ".3f"),
        "accepted ranked above rejected": figure("ranked_right", ".3f"),
        "tokens per round": lambda row: f"{row['tokens'] / row['rounds']:.2f}",
        "drafted per round": lambda row: f"{row['drafted'] / row['rounds']:.2f}",
        "estimated speed over `none`": figure("speed", ".2f"),
    }
    names = list(dict.fromkeys(row["judged"] for row in rows))
    ordered = sorted(rows, key=lambda row: names.index(row["judged"]))
    return Table.of(columns, ordered).markdown()


def read_prompts(source: str, count: int | None) -> list[Prompt]:
    """Return the first prompts of a file, or of a task of the built-in prompts."""
    path = Path(source)
    if path.suffix == ".gz":
        kind = task_quality.HUMAN_EVAL
        problems = task_quality.read(path)
        return [
            Prompt(one["task_id"], "code", (task_quality.question(kind, one),)) for one in problems
        ][:count]
    prompts = load_prompts(path) if path.exists() else load_prompts(tasks=[source])
    return prompts[:count]


def main(argv: list[str] | None = None) -> None:
    """Run the command line, print the table, and write the rows as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id of the target")
    parser.add_argument("--assistant", required=True, help="folder or Hub id of the draft model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--train", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--judge", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--num-prompts", type=int, help="the first N of each file; default: all")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=32, help="prompts answered at once")
    parser.add_argument("--cost-ratio", type=float, default=1 / 3, help="of a draft token")
    parser.add_argument("--seed", type=int, default=0, help="of the parts and the training")
    parser.add_argument("--work", type=Path, required=True, help="folder of answers")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model, options.dtype)
    draft = resolve_draft_model("disco", options.assistant, model)
    asked = ResponseSettings(max_new_tokens=options.new_tokens)
    observed: dict[str, list[Observed]] = {}
    for name, _, source in (text.partition("=") for text in [*options.train, *options.judge]):
        folder = options.work / name
        folder.mkdir(parents=True, exist_ok=True)
        answers = folder / "answers.jsonl"
        prompts = read_prompts(source, options.num_prompts)
        progress = _progress(name)
        generate_responses(model, tokenizer, prompts, answers, asked, options.batch_size, progress)
        responses = [one for one in read_responses(answers) if one.response]
        observed[name] = observe(model, draft, responses, folder, "hard")
    settings = replace(DiscoTrainSettings(), seed=options.seed)
    trained = [text.partition("=")[0] for text in options.train]
    divided = {name: parts(observed[name], options.seed) for name in trained}
    sets = {n: divided[n][2] if n in divided else found for n, found in observed.items()}
    rows = oracles(sets, options.cost_ratio)
    for name in trained:
        rows += judge(name, divided[name], sets, settings, options.cost_ratio)
    print(table(rows))
    if options.out:
        facts = {
            "environment": environment(),
            "model": shown(options.model),
            "draft": shown(options.assistant),
            "dtype": options.dtype,
            "new_tokens": options.new_tokens,
            "cost_ratio": options.cost_ratio,
            "prompts": {name: len(found) for name, found in sets.items()},
            "training_prompts": {name: len(divided[name][0]) for name in trained},
            "settings": asdict(settings),
        }
        write_json(options.out, {**facts, "rows": rows})


def _progress(name: str) -> Callable[[int, int], None]:
    return lambda done, tokens: print(f"{name}: {done} more answers, {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
