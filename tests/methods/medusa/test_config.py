"""`spec_strategy="heads"`: options, lengths, batches, and rejected options."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_spec
from hf_spec import AssistantError, HeadsConfig, OptionError
from hf_spec.drafting.one_pass_drafter import ProposalDrafter
from tests.feature_reference import (
    check_against,
    deepspec,
    medusa,
    medusa_reference,
    save,
    speculator,
    speculator_reference,
    watch_drafts,
)
from tests.host_and_device import check_same_drafts
from tests.refusals import refuse
from tests.tiny_models import TIMINGS, build, draft_model, prompts

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


@pytest.mark.parametrize("head", [medusa(), speculator()], ids=["medusa", "speculator"])
@pytest.mark.parametrize(
    "options",
    [
        {"children": 4, "expanded_per_level": 3, "max_nodes": 9},
        {"tree": [[0], [2], [0, 1], [2, 0], [2, 3], [0, 1, 1], [2, 0, 0]]},
    ],
    ids=["likeliest", "ranks"],
)
def test_drafts_that_nobody_watches(
    head: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(generate, head, length_policy="static", **options)
    check_same_drafts(monkeypatch, ProposalDrafter, run)


def test_the_likeliest_paths_are_sent() -> None:
    """By products of probabilities, each parent before its children."""
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


def test_more_prompts_than_rows() -> None:
    """A row that takes another prompt forgets the one before."""
    ids, mask = prompts("llama", "ragged").values()
    rows = [line[keep.bool()].tolist() for line, keep in zip(ids, mask, strict=True)]
    with watch_drafts() as seen:
        output = MODEL.generate_batch(
            rows,
            max_batch=2,
            max_new_tokens=6,
            do_sample=False,
            spec_strategy=HeadsConfig(tree=CHAIN),
            assistant=medusa(),
        )
    assert check_against(medusa_reference(MODEL, medusa()), seen, CHAIN) > 40
    for row, said in zip(rows, output.values(), strict=True):
        plain = MODEL.generate(torch.tensor([row]), max_new_tokens=6, do_sample=False)
        assert [*row, *said.generated_tokens] == plain[0].tolist()


@pytest.mark.parametrize("policy", ["static", "heuristic", "confidence", "measured"])
def test_length_policies(policy: str) -> None:
    generate(medusa(), length_policy=policy)


def test_confidence_ends_a_draft() -> None:
    """Random heads are never sure."""
    output = generate(medusa(), children=1, length_policy="confidence", confidence_threshold=1.0)
    assert output.spec_stats.drafted_tokens <= output.spec_stats.counters["rounds"]


def test_auto_takes_a_head(tmp_path: Path) -> None:
    timings = {**TIMINGS, "draft": {"heads": [[1, 0.001]], "tree": [[1, 0.001]]}}
    for head in (medusa(), save(tmp_path / "a-head", medusa())):
        output = MODEL.generate(
            **prompts("llama", "ragged"),
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            spec_strategy=hf_spec.AutoConfig(timings=timings),
            assistant=[head, draft_model("llama")],
        )
        assert output.spec_stats.counters["asked_heads"] > 0
        plain = MODEL.generate(**prompts("llama", "ragged"), max_new_tokens=8, do_sample=False)
        assert torch.equal(output.sequences, plain)


class TestRefused:
    def test_another_family(self) -> None:
        refuse(
            "family 'dspark': use spec_strategy='block'",
            error=AssistantError,
            spec_strategy="heads",
            assistant=deepspec(),
        )

    def test_no_head(self) -> None:
        for assistant in (None, draft_model("llama"), 7):
            refuse(
                "spec_strategy='heads' needs",
                error=AssistantError,
                spec_strategy="heads",
                assistant=assistant,
            )

    def test_a_pickle(self, tmp_path: Path) -> None:
        folder = Path(save(tmp_path / "a-head", medusa()))
        (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")
        refuse(
            "hf-spec import-head",
            error=AssistantError,
            spec_strategy="heads",
            assistant=str(folder),
        )

    def test_a_draft_deeper_than_the_head(self) -> None:
        deep = "deeper than the . levels of the head"
        for options in ({"max_draft_tokens": 4}, {"tree": [*CHAIN, [0, 0, 0, 0]]}):
            refuse(
                deep, error=OptionError, spec_strategy=HeadsConfig(**options), assistant=medusa()
            )

    def test_options(self) -> None:
        with pytest.raises(OptionError, match="lacks its parent"):
            HeadsConfig(tree=[[0, 0]])
        with pytest.raises(OptionError, match="must be a list of rank paths"):
            HeadsConfig(tree="wide")
        with pytest.raises(OptionError, match="max_draft_tokens must be"):
            HeadsConfig(max_draft_tokens=0)
        with pytest.raises(OptionError, match="needs a confidence head"):
            HeadsConfig(length_policy="head")
