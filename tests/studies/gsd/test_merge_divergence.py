"""Study of merging: the compared nodes, and their statistics."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from examples.studies.gsd.merge_divergence import (
    CONTROL,
    MERGE_LENGTHS,
    UnmergedDrafter,
    compare_merged,
    divergence,
    main,
    merged_pairs,
    recurring,
    summary,
    table,
    text,
)
from hf_spec import GsdConfig
from hf_spec.common.prompts import Prompt
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from tests.model_watch import snapshot
from tests.tiny_models import draft_model, repetitive_prompt

SHAPE: dict[str, Any] = {
    "max_draft_tokens": 3,
    "min_probability": 0.0,
    "min_sibling_ratio": 0.0,
    "max_nodes": 1000,
    "max_draft_nodes": 1000,
}
UNMERGED = GsdConfig(**SHAPE, merge_length=None)


@pytest.fixture
def draft() -> Any:
    return draft_model("llama")


def studied(model: Any, draft: Any) -> list[tuple[DraftTree, list[int], Tensor]]:
    """Return every tree of a short generation, with its context and log-probabilities."""
    seen: list[Any] = []

    def remember(tree: DraftTree, context: list[int], log_probs: Tensor) -> None:
        seen.append((tree, list(context), log_probs))

    drafter = UnmergedDrafter(UNMERGED, draft, remember)
    model.generate(
        repetitive_prompt(),
        max_new_tokens=6,
        do_sample=False,
        custom_generate=partial(generate_with, drafter),
    )
    return seen


def test_pairs_of_a_tree_made_by_hand() -> None:
    # Root 7 has the children 1 and 2; each of them is followed by 3, then 4.
    tokens, parents = [7, 1, 2, 3, 3, 4, 4], [-1, 0, 0, 1, 2, 3, 4]
    tree = DraftTree.from_rows([(tokens, parents)])
    # Equal tokens: node 4 is merged into node 3, and its descendants are not drafted.
    assert merged_pairs(tree, [7], 0) == [(4, 3)]
    # Equal runs of two tokens: only the 4 after the second 3.
    assert merged_pairs(tree, [7], 1) == [(6, 5)]
    assert merged_pairs(tree, [7], 2) == []
    # Node 3 is merged into node 2, so later nodes have other indices in the graph.
    tree = DraftTree.from_rows([([7, 1, 2, 2, 5, 6, 5], [-1, 0, 0, 1, 2, 2, 5])])
    assert merged_pairs(tree, [7], 0) == [(3, 2), (6, 4)]


def test_recurring_by_hand() -> None:
    # Root 7 has the children 1 and 2; each of them is followed by 3, then 4.
    tree = DraftTree.from_rows([([7, 1, 2, 3, 3, 4, 4], [-1, 0, 0, 1, 2, 3, 4])])
    assert [recurring(tree, length) for length in (1, 2, 3)] == [4, 4, 0]
    # The root's own token does not count.
    assert recurring(DraftTree.from_rows([([7, 7, 1], [-1, 0, 1])]), 1) == 0


@torch.no_grad()
def first_draft(
    config: GsdConfig, draft: Any, prompt: Tensor
) -> tuple[DraftTree, DraftModelDrafter]:
    stop = StopRules([MaxLengthCriteria(60)], 1)
    state = GenerationState.create(prompt, torch.ones_like(prompt), stop)
    drafter = DraftModelDrafter(config, draft)
    with drafter.active(state):
        return drafter.draft(state, state.draft_limits), drafter


@pytest.mark.parametrize("merge_length", MERGE_LENGTHS)
def test_as_many_pairs_as_a_graph_has_merges(draft: Any, merge_length: int) -> None:
    total = 0
    for seed in range(6):
        prompt = repetitive_prompt(length=11, period=3, seed=seed)
        tree, _ = first_draft(UNMERGED, draft, prompt)
        graph = GsdConfig(**SHAPE, merge_length=merge_length)
        _, drafter = first_draft(graph, draft, prompt)
        pairs = merged_pairs(tree, prompt[0].tolist(), merge_length)
        assert len(pairs) == drafter.counters["merges"]
        total += len(pairs)
    assert total > 0 or merge_length > 1


@torch.no_grad()
def test_log_probabilities_are_those_after_each_node(model: Any, draft: Any) -> None:
    tree, context, log_probs = studied(model, draft)[1]
    assert len(context) > repetitive_prompt().shape[1]
    assert log_probs.shape[0] == len(tree.tokens)
    for node in (0, 1, len(tree.tokens) // 2, len(tree.tokens) - 1):
        path, above = [], node
        while above:
            path.insert(0, tree.tokens[above])
            above = tree.parent[above]
        expected = draft(torch.tensor([[*context, *path]])).logits[0, -1].log_softmax(dim=-1)
        torch.testing.assert_close(log_probs[node], expected, atol=1e-4, rtol=1e-4)


def test_divergence() -> None:
    log_probs = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0], [0.75, 0.25, 0.0]]).log()
    assert divergence(log_probs, []) == []
    same, other, far = divergence(log_probs, [(0, 0), (0, 1), (1, 2)])
    assert same == {"kl": 0.0, "same": True}
    assert other["kl"] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)
    assert far["kl"] == pytest.approx(0.5 * math.log(3), rel=1e-6)
    assert far["same"] is False


def test_measure(model: Any, draft: Any, prompts: list[Prompt], tokenizer: Any) -> None:
    before = snapshot(model)
    measured = compare_merged(model, draft, prompts, tokenizer, 6, UNMERGED)
    assert snapshot(model) == before
    pairs = measured["pairs"]
    assert list(pairs) == ["0", "1", "2", "3", CONTROL]
    assert measured["drafted"] > len(pairs["0"]) == len(pairs[CONTROL]) > 0
    assert all(pair["kl"] > -1e-6 for found in pairs.values() for pair in found)
    assert compare_merged(model, draft, prompts, tokenizer, 6, UNMERGED) == measured
    # The recurring nodes are the merged nodes and their first occurrences.
    assert len(pairs["0"]) < measured["recurring"][0] <= measured["drafted"]
    assert measured["recurring"] == sorted(measured["recurring"], reverse=True)
    assert len(measured["ranks"]) == UNMERGED.children


@torch.no_grad()
def test_ranks_count_accepted_tokens(model: Any, draft: Any) -> None:
    ranks: Counter[int] = Counter()
    drafter = UnmergedDrafter(UNMERGED, draft, lambda *_: None, ranks)
    output = model.generate(
        repetitive_prompt(),
        max_new_tokens=6,
        do_sample=False,
        custom_generate=partial(generate_with, drafter),
        return_dict_in_generate=True,
    )
    assert sum(ranks.values()) == output.spec_stats.accepted_tokens > 0


def test_text() -> None:
    measured = {"drafted": 8, "recurring": [4, 2, 0], "ranks": [3, 1, 0, 0]}
    assert text(measured) == (
        "Part of a recurring 1-, 2-, 3-gram: 50.0%, 25.0%, 0.0% of 8 nodes. "
        "Accepted by rank: 75.0%, 25.0%, 0.0%, 0.0% of 4 tokens."
    )


def test_table() -> None:
    pairs = [{"kl": 0.1, "same": True}, {"kl": 0.2, "same": True}, {"kl": 0.6, "same": False}]
    rows = summary({"drafted": 12, "pairs": {"0": pairs, "1": []}})
    assert rows[0]["mean_kl"] == pytest.approx(0.3)
    assert rows[1] == {
        "merge_length": "1",
        "count": 0,
        "share_of_nodes": 0.0,
        "mean_kl": None,
        "median_kl": None,
        "same_argmax": None,
    }
    assert table(rows).splitlines()[2:] == [
        "| 0 | 3 | 25.0% | 0.3 | 0.2 | 66.7% |",
        "| 1 | 0 | 0.0% | - | - | - |",
    ]


@pytest.mark.parametrize("source", ["layers", "assistant"])
def test_command(folder: Path, tmp_path: Path, capsys: Any, source: str) -> None:
    out = tmp_path / "merge.json"
    draft = {"layers": ["--draft-layers", "2"], "assistant": ["--assistant", str(folder)]}[source]
    arguments = ["--model", str(folder), "--per-task", "1", "--new-tokens", "3"]
    main([*arguments, *draft, "--out", str(out)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| merge_length | merged nodes |")
    assert [line.split(" | ")[0] for line in printed[2:]] == [
        "| 0",
        "| 1",
        "| 2",
        "| 3",
        f"| {CONTROL}",
        "",
        printed[-1],
    ]
    written = json.loads(out.read_text())
    assert written["config"]["merge_length"] is None
    assert written["prompts"] == 6
    assert [row["count"] for row in written["summary"]] == [
        len(pairs) for pairs in written["pairs"].values()
    ]


def test_a_draft_is_needed(folder: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(folder)])
