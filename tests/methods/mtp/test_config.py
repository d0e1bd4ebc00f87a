"""MTP modules in generate(): drafts equal the reference in every layout; output is exact."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_spec import AssistantError, MtpConfig, UnsupportedError
from hf_spec.drafting.length_policy import make_policy
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.mtp.head import MtpHead
from tests import tiny_models
from tests.draft_rounds import check_rounds
from tests.mtp_reference import (
    NAMES,
    Reference,
    TheirReference,
    own_layer,
    sample,
    save_speculators,
)
from tests.tiny_models import ragged_batch

TREE = MtpConfig(max_draft_tokens=3, tree="dynamic", width=12, max_nodes=30, length_policy="static")
CHAIN = MtpConfig(max_draft_tokens=4, length_policy="static")


def check(model: PreTrainedModel, head: MtpHead, config: MtpConfig, expected: Any) -> int:
    drafter = PairDrafter(config, head, make_policy(config, model))
    return check_rounds(model, drafter, expected)


class TestParity:
    @pytest.mark.parametrize("layout", NAMES)
    def test_trees_in_every_layout(self, layout: str) -> None:
        found = sample("llama", layout)
        accepted = check(found.model, found.head, TREE, Reference(found).logits)
        assert accepted > 0

    def test_chains(self) -> None:
        found = sample("llama", "index")
        check(found.model, found.head, CHAIN, Reference(found).logits)

    @pytest.mark.parametrize(
        "broken", ["zeroes_first_embedding", "recycles_raw_output", "features_first"]
    )
    def test_a_wrong_reading_is_seen(self, broken: str) -> None:
        """The tests above must detect each wrong layout switch."""
        found = sample("llama", "index")
        head = copy.deepcopy(found.head)
        wrong = {broken: not getattr(head.layout, broken)}
        head.layout = dataclasses.replace(head.layout, **wrong)
        if broken == "recycles_raw_output":
            head.attention.norm, head.head.norm = head.head.norm, torch.nn.Identity()
        with pytest.raises(AssertionError):
            check(found.model, head, CHAIN, Reference(found).logits)

    def test_norms_that_count_from_one(self) -> None:
        """The target is hybrid; the reference uses a layer of its class, without a cache."""
        found = sample("qwen3_next", "qwen")
        check(found.model, found.head, CHAIN, Reference(found, own_layer(found)).logits)

    def test_what_transformers_says(self) -> None:
        """A three-layer DeepSeek-V3; `MtpModel` of transformers does not find its module."""
        found = sample("deepseek_v3", "index")
        check(found.model, found.head, TREE, TheirReference(found).logits)


class TestGenerate:
    @pytest.mark.by_default(tree=("dynamic",))
    @pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
    @pytest.mark.parametrize("tree", ["chain", "dynamic"])
    def test_greedy_output_is_the_targets_own(self, name: str, tree: str) -> None:
        layout = "qwen" if name == "qwen3_next" else "index"
        model = sample(name, layout).model
        batch = ragged_batch()
        plain = model.generate(**batch, max_new_tokens=12, do_sample=False)
        output = model.generate(
            **batch,
            max_new_tokens=12,
            do_sample=False,
            spec_strategy=MtpConfig(tree=tree, width=16, max_nodes=40),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, plain)
        assert output.spec_stats.draft_forwards > 0
        assert tree == "chain" or output.spec_stats.accepted_tokens > 0

    def test_a_folder_of_speculators(self, tmp_path: Path) -> None:
        found = sample("llama", "speculators")
        folder = save_speculators(found, tmp_path)
        outputs = [
            found.model.generate(
                **ragged_batch(),
                max_new_tokens=8,
                do_sample=False,
                spec_strategy=TREE,
                assistant=assistant,
                return_dict_in_generate=True,
            ).spec_stats.accepted_by_position
            # `heads_for` names a module in the model's own files by the model, as in the last case.
            for assistant in (folder, None, found.model.name_or_path)
        ]
        assert outputs[0] == outputs[1] == outputs[2]
        assert sum(outputs[0]) > 0


class TestRefusals:
    def test_a_model_that_was_not_loaded(self) -> None:
        with pytest.raises(AssistantError, match="was not loaded from files"):
            tiny_models.build("llama").generate(torch.tensor([[5]]), spec_strategy="mtp")

    def test_files_without_a_module(self, tmp_path: Path) -> None:
        tiny_models.build("llama").save_pretrained(tmp_path)
        model = type(tiny_models.build("llama")).from_pretrained(tmp_path)
        with pytest.raises(AssistantError, match="no tensor belongs to an MTP module"):
            model.generate(torch.tensor([[5]]), spec_strategy="mtp")

    def test_a_layer_of_another_kind(self, tmp_path: Path) -> None:
        found = sample("llama", "speculators")
        wrong = {k.replace("q_proj", "q_norm"): t for k, t in found.stored.items()}
        config = {"speculators_model_type": "mtp"}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(AssistantError, match="does not fit a layer of LlamaModel"):
            found.model.generate(torch.tensor([[5]]), spec_strategy="mtp", assistant=str(tmp_path))

    def test_a_head_of_another_target(self) -> None:
        head = sample("llama", "qwen").head
        with pytest.raises(AssistantError, match="built for"):
            tiny_models.build("llama", 1).generate(
                torch.tensor([[5]]), spec_strategy="mtp", assistant=head
            )

    def test_a_target_without_attention_functions(self, tmp_path: Path) -> None:
        found = sample("llama", "speculators")
        folder = save_speculators(found, tmp_path)
        with pytest.raises(UnsupportedError, match="use spec_strategy='draft'"):
            tiny_models.build("bloom").generate(
                torch.tensor([[5]]), spec_strategy="mtp", assistant=folder
            )
