"""Count accepted tokens of GSD by thresholds, merge length, and number of verified nodes.

Every prompt is answered greedily with every setting. Counts: accepted draft tokens per target
forward pass, nodes drafted and sent to the target, and rounds whose accepted path uses a merge
edge. Nothing is timed, so any machine gives the same figures; the cost of nodes is in
`examples/studies/full_table/smollm2_step_cost.json`. The record is written after every answer, and
the same command resumes it. Run `python -m examples.studies.gsd.sweep --help` for the options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from examples.studies import timing
from examples.studies.models import load_model
from hf_spec import GsdConfig
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.common.tables import Table
from hf_spec.methods.draft_model.loading import resolve_draft_model

# The paper's thresholds for small and large targets, and lower ones for small draft models.
THRESHOLDS = ((0.4, 0.1), (0.2, 0.3), (0.1, 0.2), (0.05, 0.1), (0.02, 0.05))
MERGE_LENGTHS = (None, 0, 1, 2)
MAX_NODES = (15, 100)


class Pair(NamedTuple):
    """Target and draft model, and the tokenizer of both."""

    model: Any
    draft: Any
    tokenizer: Any


@dataclass(frozen=True)
class Setting:
    """Values of the varied options of `GsdConfig`."""

    min_probability: float
    min_sibling_ratio: float
    merge_length: int | None
    max_nodes: int
    max_draft_nodes: int = GsdConfig.max_draft_nodes
    children: int = GsdConfig.children

    @property
    def config(self) -> GsdConfig:
        """Config with ten levels in every round, as in the paper, limited only by the node cap."""
        every = self.max_draft_nodes
        return GsdConfig(length_policy="static", expanded_per_level=every, **vars(self))


def settings(
    thresholds: Sequence[tuple[float, float]],
    merge_lengths: Sequence[int | None],
    max_nodes: Sequence[int],
    max_draft_nodes: int = GsdConfig.max_draft_nodes,
    children: Sequence[int] = (GsdConfig.children,),
) -> Iterator[Setting]:
    """Yield all combinations, with one cap on drafted nodes."""
    for pair, merge_length, most, k in product(thresholds, merge_lengths, max_nodes, children):
        yield Setting(*pair, merge_length, most, max_draft_nodes, k)


def answered(pair: Pair, ids: torch.Tensor, new_tokens: int, setting: Setting) -> dict[str, Any]:
    """Return the counts of one greedy answer, and its tokens."""
    output = pair.model.generate(
        ids,
        max_new_tokens=new_tokens,
        do_sample=False,
        spec_strategy=setting.config,
        assistant=pair.draft,
        return_dict_in_generate=True,
    )
    stats = output.spec_stats
    return {
        "tokens": output.sequences[0, ids.shape[1] :].tolist(),
        "target_forwards": stats.target_forwards,
        "draft_forwards": stats.draft_forwards,
        "sent": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        **stats.counters,
    }


def sweep(
    pair: Pair,
    prompts: Sequence[Prompt],
    new_tokens: int,
    wanted: Sequence[Setting],
    known: list[dict[str, Any]],
) -> Iterator[list[dict[str, Any]]]:
    """Answer prompts and settings that are not in `known`; yield all records after every answer.

    A record is marked `identical` if the answer equals that of plain `generate()`.
    """
    done = {(record["prompt"], Setting(**record["setting"])) for record in known}
    for prompt in tqdm(prompts, desc="prompts", disable=None):
        missing = [setting for setting in wanted if (prompt.id, setting) not in done]
        if not missing:
            continue
        ids = prompt.encode(pair.tokenizer)
        plain = pair.model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        right = plain[0, ids.shape[1] :].tolist()
        for setting in missing:
            counts = answered(pair, ids, new_tokens, setting)
            identical = counts.pop("tokens") == right
            facts = {"prompt": prompt.id, "task": prompt.task, "setting": vars(setting)}
            known.append({**facts, "identical": identical, **counts})
            yield known


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per setting, with tau and counts per round over all prompts."""
    groups: dict[Setting, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(Setting(**record["setting"]), []).append(record)
    rows = []
    for setting, found in groups.items():
        total = {name: sum(one[name] for one in found) for name in found[0] if name in SUMMED}
        rounds = total["rounds"]
        rows.append(
            {
                **vars(setting),
                "prompts": len(found),
                "identical": sum(one["identical"] for one in found),
                "tau": total["accepted"] / total["target_forwards"],
                "sent": total["sent"] / rounds,
                "drafted": total["draft_nodes"] / rounds,
                "draft_forwards": total["draft_forwards"] / rounds,
                "merges": total["merges"] / rounds,
                "merged_accepted": total["rounds_with_merged_accepted"] / rounds,
            }
        )
    order = list(Setting.__dataclass_fields__)
    return sorted(rows, key=lambda row: [-1 if row[n] is None else row[n] for n in order])


SUMMED = (
    "target_forwards",
    "draft_forwards",
    "sent",
    "accepted",
    "draft_nodes",
    "merges",
    "rounds",
    "rounds_with_merged_accepted",
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a summary as Markdown."""
    columns = {
        "thresholds": lambda row: f"{row['min_probability']:g} / {row['min_sibling_ratio']:g}",
        "`merge_length`": lambda row: str(row["merge_length"]),
        "`max_nodes`": lambda row: str(row["max_nodes"]),
        "`max_draft_nodes`": lambda row: str(row["max_draft_nodes"]),
        "`children`": lambda row: str(row["children"]),
        "tau": lambda row: f"{row['tau']:.2f}",
        "sent a round": lambda row: f"{row['sent']:.1f}",
        "drafted a round": lambda row: f"{row['drafted']:.1f}",
        "draft forwards a round": lambda row: f"{row['draft_forwards']:.1f}",
        "rounds with a merged token accepted": lambda row: f"{row['merged_accepted']:.1%}",
        "identical": lambda row: f"{row['identical']} of {row['prompts']}",
    }
    return Table.of(columns, rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id of the target")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--assistant", required=True, help="folder or Hub id of a draft model")
    parser.add_argument("--per-task", type=int, help="prompts of each task; all by default")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--thresholds", type=float, nargs=2, action="append", help="again for more")
    parser.add_argument("--merge-length", type=int, action="append", help="-1 for none")
    parser.add_argument("--max-nodes", type=int, action="append")
    parser.add_argument("--max-draft-nodes", type=int, default=GsdConfig.max_draft_nodes)
    parser.add_argument("--children", type=int, nargs="+", default=[GsdConfig.children])
    parser.add_argument("--out", type=Path, required=True, help="JSON file, continued if it exists")
    options = parser.parse_args(argv)
    lengths = options.merge_length and [None if r < 0 else r for r in options.merge_length]
    thresholds = [(low, ratio) for low, ratio in options.thresholds or THRESHOLDS]
    varied = thresholds, lengths or MERGE_LENGTHS, options.max_nodes or MAX_NODES
    wanted = list(settings(*varied, options.max_draft_nodes, options.children))
    model, tokenizer = load_model(options.model, options.dtype)
    draft = resolve_draft_model("gsd", options.assistant, model)
    pair = Pair(model, draft, tokenizer)
    facts = {
        "environment": environment(),
        "model": timing.shown(options.model),
        "dtype": options.dtype,
        "draft": timing.shown(options.assistant),
        "per_task": options.per_task,
        "new_tokens": options.new_tokens,
    }
    same = {name: facts[name] for name in ("model", "draft", "dtype", "new_tokens")}
    known = timing.gone_on(options.out, same)
    prompts = load_prompts(per_task=options.per_task)
    for records in sweep(pair, prompts, options.new_tokens, wanted, known):
        write_json(options.out, {**facts, "summary": summary(records), "records": records})
    print(table(summary(known)))


if __name__ == "__main__":
    main()
