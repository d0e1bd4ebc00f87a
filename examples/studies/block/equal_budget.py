"""Accepted tokens of draft heads of three methods, trained with the same budget.

    python -m examples.studies.block.equal_budget --model MODEL --head block=FOLDER \
        --head eagle=FOLDER --head falcon=FOLDER --out RECORD.json

Measures greedy chains of four and trees of 15 nodes in four levels. Block heads also draft whole
blocks, and both shapes with sampling at temperature 1. Nothing is timed: tau does not depend on the
machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.studies.models import load_model
from hf_spec import BlockConfig, EagleConfig, FalconConfig
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import load_prompts
from hf_spec.training.trainer import METRICS, RUN

DEPTH, NODES = 4, 15
# Largest sum of ranks along a path of Falcon's tree; its most probable nodes are verified.
MOST_RANKS = 3
ROWS = 8
SEED = 0
# Rows of the target's output head, which block heads do not train.
FROZEN = ("lm_head.", "d2t", "t2d")


def shapes(method: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, config, sampled or not) for each draft shape of a method."""
    if method == "falcon":
        paths = [
            path
            for depth in range(1, DEPTH + 1)
            for path in itertools.product(range(MOST_RANKS + 1), repeat=depth)
            if sum(path) <= MOST_RANKS
        ]
        yield "chain of 4", FalconConfig(tree="chain", max_draft_tokens=DEPTH), False
        yield "tree of 15", FalconConfig(tree=paths, max_nodes=NODES), False
    elif method == "eagle":
        wide = EagleConfig(width=4, max_draft_tokens=DEPTH, max_nodes=NODES)
        yield "chain of 4", EagleConfig(tree="chain", max_draft_tokens=DEPTH), False
        yield "tree of 15", wide, False
    else:
        tree = BlockConfig(
            children=4, expanded_per_level=4, max_draft_tokens=DEPTH, max_nodes=NODES
        )
        chain = BlockConfig(children=1, max_draft_tokens=DEPTH)
        yield "chain of 4", chain, False
        yield "tree of 15", tree, False
        yield "whole block", BlockConfig(children=1, length_policy="static"), False
        yield "chain of 4, sampled", chain, True
        yield "tree of 15, sampled", tree, True


def measure(
    model: Any, prompts: Sequence[Tensor], config: Any, head: str, sample: bool, new_tokens: int
) -> dict[str, Any]:
    """Return tau over all rounds of all prompts, and the drafter's forward passes per round."""
    total: Counter[str] = Counter()
    for start in range(0, len(prompts), ROWS):
        part = list(prompts[start : start + ROWS])
        mask = [torch.ones_like(ids) for ids in part]
        ids, mask = (pad_sequence(rows, True, padding_side="left") for rows in (part, mask))
        torch.manual_seed(SEED)
        sampling = {"temperature": 1.0, "top_k": 0} if sample else {}
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=sample,
            **sampling,
            spec_strategy=config,
            assistant=head,
            return_dict_in_generate=True,
        )
        stats = output.spec_stats
        for row in stats.rows:
            # The first round is the prefill.
            total["rounds"] += row.target_forwards - 1
            total["accepted"] += row.accepted_tokens
        total["passes"] += stats.draft_forwards
        total["forwards"] += stats.target_forwards
        for position, count in enumerate(row_sum(stats.rows)):
            total[f"accepted at {position + 1}"] += count
    return {
        "tau": round(total["accepted"] / total["rounds"], 4),
        "drafter passes per round": round(total["passes"] / total["forwards"], 2),
        **total,
    }


def row_sum(rows: Sequence[Any]) -> list[int]:
    """Return the accepted tokens of all rows, by draft position."""
    by_position = (row.accepted_by_position for row in rows)
    return [sum(counts) for counts in itertools.zip_longest(*by_position, fillvalue=0)]


def trained_parameters(method: str, folder: Path) -> int:
    """Return the number of trained weights in the files of a head."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                frozen = name.startswith(FROZEN if method == "block" else FROZEN[1:])
                if not frozen and "vocabulary" not in name:
                    count += file.get_tensor(name).numel()
    return count


def training(folder: Path) -> dict[str, Any]:
    """Return settings, number of steps, and the last evaluation of a training."""
    start = json.loads((folder / "training" / RUN).read_text())["starts"][0]
    steps = [json.loads(line) for line in (folder / "training" / METRICS).read_text().splitlines()]
    last = {k: round(v, 4) for k, v in steps[-1].items() if k.startswith(("slot", "tau", "alpha"))}
    return {
        "settings": {k: v for k, v in start["settings"].items() if k not in ("weights", "target")},
        "steps": len(steps),
        "last evaluation": last,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every head, print the results, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--head", action="append", required=True, help="METHOD=FOLDER")
    parser.add_argument("--per-task", type=int, default=4, help="prompts of each task")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, to which heads add")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model)
    prompts = [p.encode(tokenizer)[0] for p in load_prompts(per_task=options.per_task)]
    record: dict[str, Any] = {"heads": {}}
    if options.out.exists():
        record = json.loads(options.out.read_text("utf-8"))
    facts = {"prompts": len(prompts), "new_tokens": options.new_tokens, "seed": SEED}
    record = {"environment": environment(), **facts, "heads": record["heads"]}
    for head in options.head:
        method, _, folder = head.partition("=")
        found = {
            "trained parameters": trained_parameters(method, Path(folder)),
            "training": training(Path(folder)),
            "drafts": {},
        }
        for name, config, sample in shapes(method):
            result = measure(model, prompts, config, folder, sample, options.new_tokens)
            found["drafts"][name] = result
            passes = result["drafter passes per round"]
            print(f"{method}, {name}: tau {result['tau']:.3f}, {passes} passes", flush=True)
        record["heads"][method] = found
        write_json(options.out, record)


if __name__ == "__main__":
    main()
