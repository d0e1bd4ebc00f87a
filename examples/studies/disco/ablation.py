"""Ablation of the DISCO classifier: features and kinds of labels.

The paper lists its features and both kinds of labels without an ablation (Mamou et al. 2024, arXiv
2405.04304, section 3 and appendix D.1). Here one classifier is trained with all features and one
without each group of features, on hard and on soft labels, on the same positions and seeds. For
usage, run `python -m examples.studies.disco.ablation --help`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.tables import Table
from hf_spec.methods.disco.classifier import DiscoClassifier
from hf_spec.methods.disco.settings import FEATURES, DiscoTrainSettings
from hf_spec.methods.disco.training import Observed, evaluate, fit, observe
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.training.held_out import split_by_seed
from hf_spec.training.responses import read_responses

LABELS = ("hard", "soft")
NOTHING = "nothing"


def without(observed: Sequence[Observed], group: str, labels: str) -> list[Observed]:
    """Return the positions with a group of features set to zero, and hard labels if selected."""
    found = []
    for one in observed:
        features = one.features.clone()
        if group != NOTHING:
            # A constant feature is scaled to zero and carries no information.
            features[:, FEATURES[group]] = 0
        target = one.matched.float() if labels == "hard" else one.labels
        found.append(replace(one, features=features, labels=target))
    return found


def ranked_right(scores: Tensor, matched: Tensor) -> float:
    """Return the probability that an accepted position scores higher than a rejected one.

    Ties count half.

    Args:
        scores: (T,).
        matched: (T,) bool, with at least one of each value.
    """
    accepted, rejected = scores[matched], scores[~matched].sort().values
    below = torch.searchsorted(rejected, accepted, right=False)
    up_to = torch.searchsorted(rejected, accepted, right=True)
    return float((below + up_to).double().mean() / (2 * len(rejected)))


def figures(classifier: DiscoClassifier, held: Sequence[Observed], threshold: float) -> Any:
    """Return F1 of both classes at a threshold, and the threshold-free ranking accuracy."""
    rules = evaluate(classifier, held, threshold)["rules"]["disco"]
    with torch.no_grad():
        scores = classifier(torch.cat([one.features for one in held]))
    return {
        "f1_accepted": rules["accepted"]["f1"],
        "f1_rejected": rules["rejected"]["f1"],
        "ranked_right": ranked_right(scores, torch.cat([one.matched for one in held])),
    }


def ablate(
    observed: Sequence[Observed], settings: DiscoTrainSettings, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one row per kind of labels, omitted group, and seed; `observed` has soft labels."""
    ids = [one.id for one in observed]
    learned, held = split_by_seed(ids, settings.validation_share, settings.seed)
    rows = []
    for labels, group, seed in product(LABELS, (NOTHING, *FEATURES), seeds):
        seen = without(observed, group, labels)
        classifier, _ = fit(
            [one for one in seen if one.id in learned],
            [one for one in seen if one.id in held],
            replace(settings, labels=labels, seed=seed),
        )
        judged = [one for one in seen if one.id in held]
        found = figures(classifier, judged, settings.threshold)
        rows.append({"labels": labels, "left_out": group, "seed": seed, **found})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: one row per labels and group, means over the seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["labels"], row["left_out"]), []).append(row)

    def mean(name: str) -> Any:
        return lambda found: f"{sum(row[name] for row in found) / len(found):.3f}"

    columns = {
        "labels": lambda found: found[0]["labels"],
        "left out": lambda found: found[0]["left_out"],
        "F1 accepted": mean("f1_accepted"),
        "F1 rejected": mean("f1_rejected"),
        "ranked right": mean("ranked_right"),
    }
    return Table.of(columns, groups.values()).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line, print the table, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id of the target")
    parser.add_argument("--assistant", required=True, help="folder or Hub id of the draft model")
    parser.add_argument("--responses", type=Path, required=True, help="greedy answers, JSON lines")
    parser.add_argument("--observed", type=Path, required=True, help="folder; read where it is")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    draft = resolve_draft_model("disco", options.assistant, model)
    responses = [one for one in read_responses(options.responses) if one.response]
    options.observed.mkdir(parents=True, exist_ok=True)
    observed = observe(model, draft, responses, options.observed, "soft")
    settings = DiscoTrainSettings(labels="soft")
    rows = ablate(observed, settings, range(options.seeds))
    print(table(rows))
    if options.out:
        facts = {
            "environment": environment(),
            "model": options.model,
            "draft": options.assistant,
            "prompts": len(responses),
            "settings": asdict(settings),
        }
        write_json(options.out, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
