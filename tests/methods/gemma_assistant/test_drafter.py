"""Gemma assistants in generate(): drafts equal the reference; unsuitable assistants raise."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import AssistantError, GemmaAssistantConfig, UnsupportedError
from hf_spec.adapters.published import PublishedHead
from hf_spec.drafting.length_policy import make_policy
from hf_spec.engine.decode.loop import speculative_step
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.gemma_assistant.drafter import GemmaAssistantDrafter
from hf_spec.methods.gemma_assistant.head import build
from tests import tiny_models
from tests.draft_rounds import check_rounds
from tests.gemma_reference import gemma4, published, reference, save
from tests.host_and_device import check_same_drafts
from tests.methods.draft_model.test_drafter import start
from tests.tiny_models import VOCAB, ragged_batch

DEPTH = 2
TREE = GemmaAssistantConfig(
    max_draft_tokens=DEPTH, tree="dynamic", width=40, max_nodes=100, length_policy="static"
)


def made(
    config: GemmaAssistantConfig, model: PreTrainedModel, head: PublishedHead
) -> GemmaAssistantDrafter:
    return GemmaAssistantDrafter(config, make_policy(config, model), build(head, model), model)


def check(model: PreTrainedModel, head: PublishedHead, config: GemmaAssistantConfig) -> int:
    return check_rounds(model, made(config, model, head), partial(reference, head, model))


class TestParity:
    @pytest.mark.parametrize("shared", [0, 3])
    def test_trees_of_a_ragged_batch(self, shared: int) -> None:
        model = gemma4(shared)
        assert check(model, published(model), TREE) > 0

    def test_chains(self) -> None:
        model = gemma4()
        config = GemmaAssistantConfig(max_draft_tokens=DEPTH, length_policy="static")
        check(model, published(model), config)

    def test_padded_storage(self) -> None:
        model = gemma4()
        config = dataclasses.replace(TREE, batching="padded")
        check(model, published(model), config)


@pytest.mark.parametrize(
    "config",
    [
        GemmaAssistantConfig(max_draft_tokens=3, length_policy="static"),
        dataclasses.replace(TREE, max_draft_tokens=4, width=3, max_nodes=12),
    ],
)
def test_drafts_that_nobody_watches(
    config: GemmaAssistantConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gemma4()
    run = partial(check, model, published(model), config)
    check_same_drafts(monkeypatch, GemmaAssistantDrafter, run)


def test_greedy_output_is_the_targets_own(tmp_path: Path) -> None:
    model = gemma4(3)
    save(published(model), tmp_path)
    batch = ragged_batch()
    plain = model.generate(**batch, max_new_tokens=12, do_sample=False)
    output = model.generate(
        **batch,
        max_new_tokens=12,
        do_sample=False,
        spec_strategy=TREE,
        assistant=str(tmp_path),
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, plain)
    assert output.spec_stats.accepted_tokens > 0
    assert output.spec_stats.draft_forwards > 0


@torch.no_grad()
def test_a_row_drafts_once_the_target_has_run_it() -> None:
    model = gemma4()
    config = GemmaAssistantConfig(max_draft_tokens=2, length_policy="static")
    drafter = made(config, model, published(model))
    state = start(ragged_batch((5, 3)))
    target = ModelRunner(model, 2, drafter.hidden_layers)
    with target.active(), drafter.active(state):
        verifier = NodeDraw([], 2)
        speculative_step(target, drafter, verifier, state)
        assert drafter.forwards == 0
        tree = drafter.draft(state, {0: 2, 1: 1})
        assert [tree.height(row) for row in (0, 1)] == [2, 1]
        assert drafter.forwards == 2
        drafter.restart(1)
        tree = drafter.draft(state, {0: 2, 1: 2})
        assert [tree.height(row) for row in (0, 1)] == [2, 0]


def refused(
    model: PreTrainedModel, head: PublishedHead, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        model.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=2,
            spec_strategy="gemma_assistant",
            assistant=head,
        )


def changed(head: PublishedHead, **tensors: torch.Tensor | None) -> PublishedHead:
    kept = {**head.tensors, **{name.replace("__", "."): t for name, t in tensors.items()}}
    return dataclasses.replace(head, tensors={n: t for n, t in kept.items() if t is not None})


class TestRefusals:
    def test_a_target_of_another_width(self) -> None:
        head = published(gemma4())
        wide = changed(head, post_projection__weight=torch.zeros(64, 24))
        refused(
            gemma4(), wide, AssistantError, "hidden size 64, but that of Gemma4ForCausalLM is 32"
        )

    def test_another_vocabulary(self) -> None:
        head = changed(published(gemma4()), model__embed_tokens__weight=torch.zeros(500, 24))
        refused(gemma4(), head, AssistantError, "has 500 tokens, but Gemma4ForCausalLM has 97")

    def test_layers_that_the_target_does_not_have(self) -> None:
        refused(
            tiny_models.build("llama"),
            published(gemma4()),
            UnsupportedError,
            "layers of type sliding",
        )

    def test_heads_of_another_size(self) -> None:
        head = published(gemma4())
        head = changed(head, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
        refused(gemma4(), head, AssistantError, "2 query heads of size 16, but layer 4")

    def test_a_missing_tensor(self) -> None:
        head = changed(published(gemma4()), model__norm__weight=None)
        refused(gemma4(), head, AssistantError, "norm.weight is missing")

    def test_groups_that_do_not_share_out_the_vocabulary(self) -> None:
        head = published(gemma4(), groups=1)
        twice = torch.zeros(VOCAB, dtype=torch.long)
        head = changed(head, masked_embedding__token_ordering=twice)
        refused(gemma4(), head, AssistantError, "does not divide 97 tokens into 1 groups")

    def test_an_unknown_rope(self) -> None:
        head = published(gemma4())
        text = {
            **head.config["text_config"],
            "rope_parameters": {"full_attention": {"rope_type": "yarn"}},
        }
        head = dataclasses.replace(head, config={**head.config, "text_config": text})
        refused(gemma4(), head, AssistantError, "rope_type='yarn'")
