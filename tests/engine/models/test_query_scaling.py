"""Queries scaled by position, and chunked attention: Llama 4 against plain `generate()`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_spec
from hf_spec import SpecGenerateOutput
from hf_spec.backend.device.capture import padded_steps
from hf_spec.common.compat import CACHE_NAME
from hf_spec.engine import runner
from hf_spec.engine.forward.packing import PackedInputs
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.engine.forward.step import LayerTraits
from hf_spec.engine.models.internal_positions import QueryPositions, scales_queries
from hf_spec.engine.models.support_checks import check_model
from hf_spec.generation.one_call import generate_with
from tests.partly_right import PartlyRight
from tests.refusals import refuse
from tests.tiny_models import build, prompts

KINDS = ("one", "ragged")
SHAPES = ("chain", "tree")
CALL: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}


@cache
def plain(kind: str) -> Tensor:
    return llama4().generate(**prompts("llama4", kind), **CALL)


def llama4() -> PreTrainedModel:
    """Return a model with chunks of a third of the prompt and a new scale every fourth position."""
    return build("llama4")


def speculate(kind: str, shape: str, batching: str = "unpadded") -> SpecGenerateOutput:
    inputs = prompts("llama4", kind)
    answers = [row[inputs["input_ids"].shape[1] :].tolist() for row in plain(kind)]
    drafts = PartlyRight(answers, branches=shape == "tree")
    output: Any = llama4().generate(
        **inputs,
        **CALL,
        custom_generate=partial(generate_with, drafts, batching=batching),
        return_dict_in_generate=True,
    )
    return output


def test_the_cache_answers_with_what_leads_to_the_position() -> None:
    positions = QueryPositions(torch.tensor([7, 8, 8, 3]))
    assert (torch.arange(4) + positions.get_seq_length(1)).tolist() == [7, 8, 8, 3]
    keys, values = torch.ones(1), torch.zeros(1)
    assert positions.update(keys, values, 0) == (keys, values)


def test_whose_layers_scale_by_position() -> None:
    assert scales_queries(llama4())
    assert not scales_queries(build("llama"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_chains_and_trees(kind: str, shape: str) -> None:
    output = speculate(kind, shape)
    assert torch.equal(output.sequences, plain(kind))
    assert output.spec_stats.accepted_tokens > 20
    assert min(len(set(row[-40:].tolist())) for row in plain(kind)) >= 20


@pytest.mark.parametrize("batching", [name for name in BATCHING if name != "unpadded"])
def test_every_layout(batching: str) -> None:
    assert torch.equal(speculate("ragged", "tree", batching).sequences, plain("ragged"))


def test_steps_in_the_form_of_graphs() -> None:
    with padded_steps():
        output = speculate("ragged", "tree")
    assert torch.equal(output.sequences, plain("ragged"))


@pytest.mark.parametrize("mistake", ["no chunks", "no positions", "no padding"])
def test_mistakes_that_change_the_tokens(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "no chunks":
        read = LayerTraits.of
        monkeypatch.setattr(LayerTraits, "of", lambda module: replace(read(module), chunk=None))
    elif mistake == "no positions":
        monkeypatch.setattr(runner, "scales_queries", lambda model: False)
    else:
        right = PackedInputs.frame_positions
        monkeypatch.setattr(
            PackedInputs, "frame_positions", lambda self, pads: right(self, [0] * len(pads))
        )
    assert not torch.equal(speculate("ragged", "tree").sequences, plain("ragged"))


def test_prompts_one_after_the_other() -> None:
    """`generate_batch()` does not pad."""
    ids = prompts("llama4", "ragged")
    texts = [row[mask.bool()].tolist() for row, mask in zip(*ids.values(), strict=True)][:3]
    call = {**CALL, "max_new_tokens": 16}
    outputs = llama4().generate_batch(texts, **call, spec_strategy="lookup", max_batch=2)
    for text, output in zip(texts, outputs.values(), strict=True):
        alone = llama4().generate(torch.tensor([text]), **call)
        assert output.generated_tokens == alone[0, len(text) :].tolist()


def test_a_reused_cache() -> None:
    """The chunked layers of the cache store only the last tokens."""
    found = []
    for options in ({}, {"spec_strategy": "lookup"}):
        cached = DynamicCache(config=llama4().config)
        text = prompts("llama4", "one")["input_ids"]
        for _ in range(2):
            mask = torch.ones_like(text)
            call = {**CALL, "max_new_tokens": 20, "attention_mask": mask, **options}
            text = llama4().generate(text, **call, **{CACHE_NAME: cached})
            text = torch.cat([text, text[:, 5:9]], dim=1)
        found.append(text)
    assert torch.equal(*found)


def test_holes_in_the_mask_are_refused() -> None:
    mask = torch.ones_like(plain("one"))
    mask[0, 3] = 0
    refuse("a chunk counts", model=llama4(), input_ids=plain("one"), attention_mask=mask)


def test_a_truncated_draft_scales_too() -> None:
    draft = hf_spec.truncated_draft(llama4(), 2)
    check_model(draft)
    assert scales_queries(draft)
