"""Oracle draft lengths, and the accuracy of rules that predict them (DISCO).

The oracle drafts exactly the tokens that the target accepts. The histogram and spread of its
lengths show the potential of a dynamic length (Mamou et al. 2024, arXiv 2405.04304, figures 3 to 6
and table 2). On the same rounds, this study compares the DISCO classifier, a threshold on the draft
model's probability, and fixed lengths. Nothing is timed. For usage, run
`python -m examples.studies.disco.oracle_lengths --help`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from examples.studies.disco.ablation import ranked_right
from examples.studies.models import load_model
from examples.studies.timing import shown
from hf_spec.adapters.folder import load_adapter
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.common.tables import Table
from hf_spec.methods.disco.classifier import DiscoClassifier
from hf_spec.methods.disco.training import STATIC_LENGTHS, Observed, observe, round_positions
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.training.responses import Response

THRESHOLDS = tuple(step / 20 for step in range(1, 20))
# Longer drafts share the last row of the histogram.
LONGEST_SHOWN = 10
ALL = "all"


def oracle_lengths(matched: Sequence[bool]) -> list[int]:
    """Return the accepted tokens of every round of an answer; the last round may be cut short.

    Args:
        matched: per position of the answer, True where the draft model predicts its token.
    """
    lengths = [0]
    for match in matched:
        if match:
            lengths[-1] += 1
        else:
            lengths.append(0)
    # The round after a mismatch at the very end never starts.
    return lengths if matched and matched[-1] else lengths[:-1]


def spread(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the histogram and moments of draft lengths."""
    counts = Counter(lengths)
    return {
        "rounds": len(lengths),
        "mean": fmean(lengths),
        "standard_deviation": pstdev(lengths),
        "median": median(lengths),
        "longest": max(lengths),
        "histogram": {str(length): counts[length] for length in sorted(counts)},
    }


def f1(predicted: Tensor, actual: Tensor) -> float:
    """Return the F1 of (T,) bool predictions; 0 if there is nothing to find."""
    total = int(predicted.sum()) + int(actual.sum())
    return 2 * int((predicted & actual).sum()) / total if total else 0.0


def cross_chosen(scores: Tensor, matched: Tensor, halves: Tensor) -> dict[str, Any]:
    """Return F1 at thresholds chosen on the other half of the prompts.

    Args:
        scores: (T,) score of each position.
        matched: (T,) bool.
        halves: (T,) bool, half of each position.
    """
    predicted = torch.zeros_like(matched)
    chosen = []
    for half in (halves, ~halves):
        best = max(THRESHOLDS, key=lambda t: f1(scores[~half] >= t, matched[~half]))
        chosen.append(best)
        predicted[half] = scores[half] >= best
    return {
        "f1_accepted": f1(predicted, matched),
        "f1_rejected": f1(~predicted, ~matched),
        "thresholds": chosen,
    }


def rules(
    classifier: DiscoClassifier, observed: Sequence[Observed], thresholds: Sequence[float]
) -> dict[str, Any]:
    """Return F1 of the rules on the same rounds.

    Args:
        classifier: DISCO classifier.
        observed: answers to at least two prompts.
        thresholds: classifier thresholds to report in addition to the chosen ones.
    """
    matched = torch.cat([one.matched for one in observed])
    features = torch.cat([one.features for one in observed])
    halves = torch.cat(
        [torch.full_like(one.matched, bool(n % 2)) for n, one in enumerate(observed)]
    )
    positions = torch.cat([round_positions(one.matched) for one in observed])
    with torch.no_grad():
        scores = {"classifier": classifier(features).sigmoid(), "confidence": features[:, 0]}
    found: dict[str, Any] = {}
    for name, values in scores.items():
        found[name] = {
            **cross_chosen(values, matched, halves),
            "ranked_right": ranked_right(values, matched),
            "f1_accepted_by_threshold": {
                f"{t:g}": f1(values >= t, matched) for t in sorted({*THRESHOLDS, *thresholds})
            },
        }
    for length in STATIC_LENGTHS:
        predicted = positions < length
        found[f"static {length}"] = {
            "f1_accepted": f1(predicted, matched),
            "f1_rejected": f1(~predicted, ~matched),
        }
    return found


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int
) -> list[Response]:
    """Return the greedy answers of the target."""
    found = []
    for prompt in tqdm(prompts, desc="prompts", disable=None):
        ids = prompt.encode(tokenizer)
        output = model.generate(
            ids, max_new_tokens=new_tokens, do_sample=False, spec_strategy="none"
        )
        answer = output[0, ids.shape[1] :].tolist()
        found.append(Response(prompt.id, prompt.task, ids[0].tolist(), answer))
    return found


def measure(
    observed: Sequence[Observed],
    tasks: Mapping[str, str],
    classifier: DiscoClassifier,
    thresholds: Sequence[float],
) -> dict[str, Any]:
    """Return lengths and rules over all prompts and by task.

    Args:
        observed: one entry per prompt.
        tasks: prompt id -> task.
        classifier: DISCO classifier.
        thresholds: see `rules`.
    """
    lengths: dict[str, list[int]] = {ALL: []}
    for one in observed:
        mine = oracle_lengths(one.matched.tolist())
        lengths[ALL] += mine
        lengths.setdefault(tasks[one.id], []).extend(mine)
    return {
        "prompts": len(observed),
        "positions": sum(len(one.matched) for one in observed),
        "lengths": {task: spread(found) for task, found in lengths.items()},
        "rules": rules(classifier, observed, thresholds),
    }


def lengths_table(lengths: Mapping[str, Mapping[str, Any]]) -> str:
    """Return Markdown: one row per task, shares of rounds by length."""
    rows = list(lengths.items())

    def share(first: int, last: int | None = None) -> Any:
        def cell(row: tuple[str, Mapping[str, Any]]) -> str:
            counts = {int(length): count for length, count in row[1]["histogram"].items()}
            inside = [
                count
                for length, count in counts.items()
                if first <= length and (last is None or length <= last)
            ]
            return f"{sum(inside) / row[1]['rounds']:.1%}"

        return cell

    columns = {
        "task": lambda row: row[0],
        "rounds": lambda row: str(row[1]["rounds"]),
        "mean": lambda row: f"{row[1]['mean']:.2f}",
        "standard deviation": lambda row: f"{row[1]['standard_deviation']:.2f}",
        "longest": lambda row: str(row[1]["longest"]),
        **{f"{n}": share(n, n) for n in range(4)},
        "4 to 9": share(4, LONGEST_SHOWN - 1),
        f"{LONGEST_SHOWN} or more": share(LONGEST_SHOWN),
    }
    return Table.of(columns, rows).markdown()


def rules_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return Markdown: one row per rule."""
    columns = {
        "rule": lambda row: row[0],
        "F1 accepted": lambda row: f"{row[1]['f1_accepted']:.3f}",
        "F1 rejected": lambda row: f"{row[1]['f1_rejected']:.3f}",
        "accepted ranked above rejected": lambda row: (
            f"{row[1]['ranked_right']:.3f}" if "ranked_right" in row[1] else "-"
        ),
    }
    return Table.of(columns, list(found.items())).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id of the target")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--assistant", required=True, help="folder or Hub id of the draft model")
    parser.add_argument("--classifier", required=True, help="folder of a DISCO adapter")
    parser.add_argument("--per-task", type=int, help="prompts of each task; default: all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model, options.dtype)
    draft = resolve_draft_model("disco", options.assistant, model)
    adapter = load_adapter(options.classifier, "disco")
    classifier = DiscoClassifier.from_adapter(adapter)
    prompts = load_prompts(per_task=options.per_task)
    responses = answers(model, tokenizer, prompts, options.new_tokens)
    with TemporaryDirectory() as folder:
        observed = observe(model, draft, responses, Path(folder), "hard")
    tasks = {prompt.id: prompt.task for prompt in prompts}
    measured = measure(observed, tasks, classifier, [adapter.options["threshold"]])
    print(lengths_table(measured["lengths"]), rules_table(measured["rules"]), sep="\n\n")
    if options.out:
        facts = {
            "environment": environment(),
            "model": shown(options.model),
            "dtype": options.dtype,
            "draft": shown(options.assistant),
            "classifier": shown(options.classifier),
            "new_tokens": options.new_tokens,
        }
        write_json(options.out, {**facts, **measured})


if __name__ == "__main__":
    main()
