"""Measure how much the next-token distributions of merged nodes of a GSD token graph differ.

A token graph continues a merged node with the nodes below its first occurrence. For every node that
would be merged, this compares the draft model's next-token distribution on the node's own path with
that of the first occurrence: KL(own || first) in nats, as in Table 5 of Gong et al. 2024 (arXiv
2407.16207), whose tau is `merge_length`. Random pairs of nodes are the control. It also counts
nodes that are part of an n-gram that recurs in their draft tree (Figure 3), and accepted tokens by
rank among their siblings (Figure 7). Run `python -m examples.studies.gsd.merge_divergence --help`
for the options.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from examples.studies.models import load_model
from examples.studies.timing import shown
from hf_spec import GsdConfig
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.common.tables import Table
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.runner import ModelRunner
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.draft_model.truncated import truncated_draft

MERGE_LENGTHS = (0, 1, 2, 3)
CONTROL = "random pair"
# Lengths of recurring n-grams.
GRAMS = (1, 2, 3)
# Number of pairs whose distributions are compared at once.
CHUNK_PAIRS = 256

Pair = tuple[int, int]
# Called with each one-row draft tree, its text, and (N, V) next-token log-probabilities.
Study = Callable[[DraftTree, list[int], Tensor], None]


def merged_pairs(tree: DraftTree, context: Sequence[int], merge_length: int) -> list[Pair]:
    """Return the nodes of an unmerged tree that a graph would merge, with their first occurrences.

    Args:
        tree: a draft of one row; siblings in order of rank.
        context: the committed tokens, including the root.
        merge_length: see `hf_spec.drafting.token_graph`.

    Returns:
        (node, first occurrence) in drafting order. Nodes below a merged one are left out, because
        a graph does not contain them.
    """
    graph = TokenGraph(context, merge_length)
    nodes, origins, pairs = {0: 0}, [0], []
    level = [0]
    while level:
        # Graphs are drafted level by level, and never below a merged node.
        below = [child for node in level for child in tree.children[node]]
        level = []
        for node in below:
            parent = nodes[tree.parent[node]]
            new = graph.add(parent, tree.tokens[node], 1.0)
            if new is None:
                pairs.append((node, origins[graph.edges[parent][-1][0]]))
            else:
                nodes[node] = new
                origins.append(node)
                level.append(node)
    return pairs


def recurring(tree: DraftTree, length: int) -> int:
    """Return the number of nodes of a one-row tree that are part of a recurring n-gram.

    Args:
        tree: a draft; its root is not part of an n-gram.
        length: n, counted along paths.
    """
    by_tokens: dict[tuple[int, ...], list[list[int]]] = {}
    for node in range(1, len(tree.tokens)):
        if tree.depth[node] >= length:
            path = [node]
            while len(path) < length:
                path.append(tree.parent[path[-1]])
            by_tokens.setdefault(tuple(tree.tokens[n] for n in path), []).append(path)
    return len(
        {n for paths in by_tokens.values() if len(paths) > 1 for path in paths for n in path}
    )


def divergence(log_probs: Tensor, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return KL(first of pair || second) in nats, and if both have the same most likely token.

    Args:
        log_probs: (N, V) natural log-probabilities.
        pairs: pairs of node indices.
    """
    compared: list[dict[str, Any]] = []
    for start in range(0, len(pairs), CHUNK_PAIRS):
        chunk = zip(*pairs[start : start + CHUNK_PAIRS], strict=True)
        own, first = (log_probs[list(nodes)].double() for nodes in chunk)
        kl = (own.exp() * (own - first)).nansum(dim=-1)
        same = own.argmax(dim=-1) == first.argmax(dim=-1)
        compared += [{"kl": k, "same": s} for k, s in zip(kl.tolist(), same.tolist(), strict=True)]
    return compared


class UnmergedDrafter(DraftModelDrafter):
    """Drafter without merging that passes each tree and its log-probabilities to `study`.

    Args:
        config: options with `merge_length` None.
        model: the draft model.
        study: called with every tree.
        ranks: receives counts of accepted tokens by rank among their siblings.
    """

    def __init__(
        self,
        config: GsdConfig,
        model: PreTrainedModel,
        study: Study,
        ranks: Counter[int] | None = None,
    ):
        super().__init__(config, model)
        self._study = study
        self._ranks = Counter() if ranks is None else ranks
        self._reader = ModelRunner(model, 1)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """See `Drafter`; then run the draft model on the whole tree, including its leaves."""
        tree = super().draft(state, limits)
        with self._reader.active():
            logits = self._reader.forward(tree, state.tokens).logits
            self._reader.keep([[]])
        self._study(tree, state.tokens[0], logits.float().log_softmax(dim=-1))
        return tree

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """See `Drafter`; also count ranks of accepted tokens."""
        tree = verdict.tree
        for node in verdict.accepted[0]:
            self._ranks[tree.children[tree.parent[node]].index(node)] += 1
        super().observe(verdict, output)


def compare_merged(
    model: Any,
    draft: PreTrainedModel,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    new_tokens: int,
    config: GsdConfig,
) -> dict[str, Any]:
    """Answer every prompt greedily with unmerged drafts, and compare nodes that would be merged.

    Args:
        model: the target model.
        draft: the draft model.
        prompts: prompts to answer.
        tokenizer: tokenizer of both models.
        new_tokens: length of an answer.
        config: options of the trees, with `merge_length` None.

    Returns:
        "drafted": number of nodes; "recurring": see `recurring`, for each of `GRAMS`; "ranks":
        number of accepted tokens by rank among their siblings; "pairs": name -> one {"kl", "same"}
        per pair. Names are the merge lengths and the control, which has the same number of pairs
        as merge length 0.
    """
    rng = random.Random(0)  # noqa: S311 - repeatable, not secret
    pairs: dict[str, list[dict[str, Any]]] = {str(name): [] for name in (*MERGE_LENGTHS, CONTROL)}
    drafted = 0
    repeated = dict.fromkeys(GRAMS, 0)
    ranks: Counter[int] = Counter()

    def study(tree: DraftTree, context: list[int], log_probs: Tensor) -> None:
        nonlocal drafted
        count = len(tree.tokens) - 1
        drafted += count
        for length in GRAMS:
            repeated[length] += recurring(tree, length)
        for merge_length in MERGE_LENGTHS:
            found = merged_pairs(tree, context, merge_length)
            pairs[str(merge_length)] += divergence(log_probs, found)
            if merge_length == 0:
                drawn = [rng.sample(range(1, count + 1), 2) for _ in found]
                pairs[CONTROL] += divergence(log_probs, [(a, b) for a, b in drawn])

    for prompt in tqdm(prompts, desc="prompts", disable=None):
        model.generate(
            prompt.encode(tokenizer),
            max_new_tokens=new_tokens,
            do_sample=False,
            custom_generate=partial(generate_with, UnmergedDrafter(config, draft, study, ranks)),
        )
    by_rank = [ranks[rank] for rank in range(config.children)]
    grams = [repeated[length] for length in GRAMS]
    return {"drafted": drafted, "recurring": grams, "ranks": by_rank, "pairs": pairs}


def summary(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per merge length and one for the control.

    A row has the count, share of nodes, KL, and share of pairs with the same most likely token.
    Statistics are None if no node would be merged.
    """
    rows = []
    for name, pairs in measured["pairs"].items():
        kl = [pair["kl"] for pair in pairs]
        rows.append(
            {
                "merge_length": name,
                "count": len(pairs),
                "share_of_nodes": len(pairs) / measured["drafted"],
                "mean_kl": fmean(kl) if kl else None,
                "median_kl": median(kl) if kl else None,
                "same_argmax": fmean(pair["same"] for pair in pairs) if kl else None,
            }
        )
    return rows


def text(measured: Mapping[str, Any]) -> str:
    """Return shares of recurring n-grams and of accepted ranks as text."""
    accepted, drafted = sum(measured["ranks"]), measured["drafted"]
    grams = ", ".join(f"{count / drafted:.1%}" for count in measured["recurring"])
    ranks = ", ".join(f"{count / accepted:.1%}" for count in measured["ranks"] if accepted)
    return (
        f"Part of a recurring 1-, 2-, 3-gram: {grams} of {drafted} nodes. "
        f"Accepted by rank: {ranks} of {accepted} tokens."
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a summary as Markdown."""

    def figure(name: str, form: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: "-" if row[name] is None else format(row[name], form)

    columns = {
        "merge_length": figure("merge_length", ""),
        "merged nodes": figure("count", ""),
        "of drafted nodes": figure("share_of_nodes", ".1%"),
        "mean KL, nats": figure("mean_kl", ".3g"),
        "median KL": figure("median_kl", ".3g"),
        "same likeliest token": figure("same_argmax", ".1%"),
    }
    return Table.of(columns, rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every pair as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id of the target")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    draft_from = parser.add_mutually_exclusive_group(required=True)
    draft_from.add_argument("--draft-layers", type=int, help="draft with its first N layers")
    draft_from.add_argument("--assistant", help="folder or Hub id of a draft model")
    parser.add_argument("--per-task", type=int, help="prompts of each task; all by default")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--children", type=int, default=GsdConfig.children, help="most per node")
    parser.add_argument("--max-draft-nodes", type=int, default=GsdConfig.max_draft_nodes)
    thresholds = (GsdConfig.min_probability, GsdConfig.min_sibling_ratio)
    parser.add_argument("--thresholds", type=float, nargs=2, default=thresholds)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model, options.dtype)
    draft = (
        truncated_draft(model, options.draft_layers)
        if options.assistant is None
        else resolve_draft_model("gsd", options.assistant, model)
    )
    config = GsdConfig(
        merge_length=None,
        children=options.children,
        max_nodes=options.max_draft_nodes,
        max_draft_nodes=options.max_draft_nodes,
        expanded_per_level=options.max_draft_nodes,
        min_probability=options.thresholds[0],
        min_sibling_ratio=options.thresholds[1],
    )
    prompts = load_prompts(per_task=options.per_task)
    measured = compare_merged(model, draft, prompts, tokenizer, options.new_tokens, config)
    rows = summary(measured)
    print(table(rows), text(measured), sep="\n\n")
    if options.out:
        facts = {
            "environment": environment(),
            "model": shown(options.model),
            "dtype": options.dtype,
            "draft": (options.assistant and shown(options.assistant))
            or f"first {options.draft_layers} layers",
            "prompts": len(prompts),
            "new_tokens": options.new_tokens,
            "config": config.to_dict(),
        }
        options.out.write_text(json.dumps({**facts, "summary": rows, **measured}, indent=1))


if __name__ == "__main__":
    main()
