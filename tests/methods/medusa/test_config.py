"""`spec_strategy="heads"`: options, lengths, batches, and rejected options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_spec import HeadsConfig, OptionError
from tests.feature_reference import (
    medusa,
    speculator,
    speculator_reference,
    watch_drafts,
)
from tests.tiny_models import build, prompts

MODEL = build("llama")
CHAIN = [[0], [0, 0], [0, 0, 0]]


def generate(assistant: Any, kind: str = "ragged", **options: Any) -> Any:
    inputs = prompts("llama", kind)
    output = MODEL.generate(
        **inputs,
        max_new_tokens=10,
        do_sample=False,
        return_dict_in_generate=True,
        assistant=assistant,
        spec_strategy=HeadsConfig(**options),
    )
    plain = MODEL.generate(**inputs, max_new_tokens=10, do_sample=False)
    assert torch.equal(output.sequences, plain)
    return output


@pytest.mark.parametrize("head", [medusa(), speculator()], ids=["medusa", "speculator"])
def test_greedy_output_is_the_targets(head: Any) -> None:
    assert generate(head, children=1, max_draft_tokens=3).spec_stats.drafted_tokens > 0
    wide = generate(head, children=97, expanded_per_level=2, max_nodes=130)
    assert wide.spec_stats.accepted_tokens > 0
    generate(head, "one")


def test_the_likeliest_paths_are_sent() -> None:
    """Nodes with the highest path probabilities are sent, each parent before its children."""
    head = speculator()
    with watch_drafts() as seen:
        generate(head, children=4, expanded_per_level=4, max_nodes=6)
    reference = speculator_reference(MODEL, head)
    tree, texts, unfinished = seen[1]
    for row in unfinished:
        scores: dict[tuple[int, ...], float] = {(): 1.0}
        for length in range(3):
            for path in [p for p in scores if len(p) == length]:
                chances = reference(texts[row], path).softmax(-1).topk(4)
                for chance, token in zip(*(part.tolist() for part in chances), strict=True):
                    scores[(*path, token)] = scores[path] * chance
        best = sorted(scores.values(), reverse=True)[1:7]
        found = []
        reach = {}
        for node in tree.nodes(row):
            above = reach.get(tree.parent[node], 1.0)
            reach[node] = above * tree.node_probs[node]
            found.append(reach[node])
        assert sorted(found[1:], reverse=True) == pytest.approx(best, rel=1e-4)


def test_a_pass_a_round() -> None:
    rounds = generate(medusa(), children=1, max_draft_tokens=3).spec_stats
    assert rounds.draft_forwards == max(row.target_forwards for row in rounds.rows) - 2
    steps = generate(speculator(), children=1, max_draft_tokens=3).spec_stats
    assert steps.draft_forwards > 2 * rounds.draft_forwards


def test_confidence_ends_a_draft() -> None:
    """Random heads never reach a confidence of 1."""
    output = generate(medusa(), children=1, length_policy="confidence", confidence_threshold=1.0)
    assert output.spec_stats.drafted_tokens <= output.spec_stats.counters["rounds"]


def test_there_is_no_confidence_head() -> None:
    with pytest.raises(OptionError, match="needs a confidence head"):
        HeadsConfig(length_policy="head")
