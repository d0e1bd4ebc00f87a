"""Behavior that `heads` and `block` share: batches, tree growth, and rejected assistants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, BlockConfig, HeadsConfig, OptionError, UnsupportedError
from hf_spec.adapters.published import PublishedHead
from hf_spec.drafting.one_pass_drafter import ProposalDrafter
from hf_spec.methods.registry import make_drafter
from tests.feature_reference import (
    Reference,
    block_reference,
    check_against,
    deepspec,
    dflash,
    medusa,
    medusa_reference,
    save,
    speculator,
    watch_drafts,
)
from tests.host_and_device import check_same_drafts
from tests.refusals import refuse
from tests.tiny_models import build, draft_model, prompts

MODEL = build("llama")
TREE = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0]]


@dataclass(frozen=True)
class Case:
    """A strategy, its config, one of its heads, and the reference of that head."""

    strategy: str
    config: Any
    head: PublishedHead
    reference: Reference


CASES = [
    Case("heads", HeadsConfig, medusa(), medusa_reference(MODEL, medusa())),
    Case("block", BlockConfig, deepspec(), block_reference(MODEL, deepspec(), True)),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.strategy)


def generate(config: Any, assistant: Any) -> Any:
    inputs = {**prompts("llama", "ragged"), "max_new_tokens": 8, "do_sample": False}
    output = MODEL.generate(
        **inputs, return_dict_in_generate=True, assistant=assistant, spec_strategy=config
    )
    assert torch.equal(output.sequences, MODEL.generate(**inputs))
    return output


@each_case
def test_more_prompts_than_rows(case: Case) -> None:
    """A row that starts another prompt keeps no state of the previous one."""
    ids, mask = prompts("llama", "ragged").values()
    rows = [line[keep.bool()].tolist() for line, keep in zip(ids, mask, strict=True)]
    with watch_drafts() as seen:
        output = MODEL.generate_batch(
            rows,
            max_batch=2,
            max_new_tokens=6,
            do_sample=False,
            spec_strategy=case.config(tree=TREE),
            assistant=case.head,
        )
    assert check_against(case.reference, seen, TREE) > 40
    for row, answer in zip(rows, output.values(), strict=True):
        plain = MODEL.generate(torch.tensor([row]), max_new_tokens=6, do_sample=False)
        assert [*row, *answer.generated_tokens] == plain[0].tolist()


@pytest.mark.parametrize(
    ("config", "head"),
    [
        (HeadsConfig(children=4, expanded_per_level=3, max_nodes=9), medusa()),
        (HeadsConfig(children=4, expanded_per_level=3, max_nodes=9), speculator()),
        (HeadsConfig(tree=[[0], [2], [0, 1], [2, 0], [2, 3], [0, 1, 1], [2, 0, 0]]), medusa()),
        (HeadsConfig(tree=[[0], [2], [0, 1], [2, 0], [2, 3], [0, 1, 1], [2, 0, 0]]), speculator()),
        (BlockConfig(children=3, max_nodes=9), deepspec()),
        (BlockConfig(tree=TREE), dflash()),
    ],
)
def test_growth_on_the_device(config: Any, head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**config.to_dict(), "length_policy": "static"}
    check_same_drafts(monkeypatch, ProposalDrafter, partial(generate, options, head))


@each_case
def test_rejected_assistants(case: Case, tmp_path: Path) -> None:
    rejected = partial(refuse, error=AssistantError, spec_strategy=case.strategy)
    other = next(other for other in CASES if other is not case)
    match = f"family '{other.head.family}': use spec_strategy='{other.strategy}'"
    rejected(match, assistant=other.head)
    for assistant in (None, draft_model("llama"), 7):
        rejected(f"spec_strategy='{case.strategy}' needs", assistant=assistant)
    folder = Path(save(tmp_path / "head", case.head))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    rejected("get the file again", assistant=str(folder))
    file.rename(folder / "medusa_lm_head.pt")
    rejected("hf-spec import-head", assistant=str(folder))


@each_case
def test_drafts_deeper_than_the_head(case: Case) -> None:
    for options in ({"max_draft_tokens": 9}, {"tree": [[0] * depth for depth in range(1, 10)]}):
        refuse(
            "deeper than the . levels of the head",
            error=OptionError,
            spec_strategy=case.config(**options),
            assistant=case.head,
        )


@each_case
def test_assisted_decoding_of_transformers(case: Case) -> None:
    drafter = make_drafter(case.config(length_policy="static", max_nodes=9), MODEL, case.head)
    with pytest.raises(UnsupportedError, match=f"use spec_strategy='{case.strategy}'"):
        drafter.get_candidates(torch.tensor([[3]]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tree": [[0, 0]]}, "lacks its parent"),
        ({"tree": "wide"}, "must be a list of rank paths"),
        ({"max_draft_tokens": 0}, "max_draft_tokens must be"),
        ({"sample_drafts": 2}, "must be True or False"),
    ],
)
def test_options(options: dict[str, Any], match: str) -> None:
    for case in CASES:
        with pytest.raises(OptionError, match=match):
            case.config(**options)
