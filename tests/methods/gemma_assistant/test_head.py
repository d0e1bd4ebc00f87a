"""Gemma assistants without a drafter: rotary frequencies, token groups, and file loading."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hf_spec.adapters.published import read_published
from hf_spec.methods.gemma_assistant.head import build, inverse_frequencies
from tests.gemma_reference import WIDTH, gemma4, published, save


class TestFrequencies:
    def test_default_ones_turn_all_of_a_head(self) -> None:
        found = inverse_frequencies({"rope_type": "default", "rope_theta": 16.0}, 8)
        assert found.tolist() == pytest.approx([1.0, 0.5, 0.25, 0.125])

    def test_proportional_ones_turn_the_first_part(self) -> None:
        rope = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 16.0}
        assert inverse_frequencies(rope, 8).tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0])


class TestGroups:
    def test_only_tokens_of_the_best_groups_have_logits(self) -> None:
        model = gemma4()
        head = dataclasses.replace(published(model, groups=97), name="groups")
        assistant = build(head, model)
        torch.manual_seed(0)
        hidden = torch.randn(5, WIDTH)
        best = (hidden @ head.tensors["masked_embedding.centroids.weight"].T).topk(2).indices
        whole = hidden @ head.tensors["model.embed_tokens.weight"].T
        tokens = head.tensors["masked_embedding.token_ordering"][best]
        expected = torch.full_like(whole, float("-inf"))
        expected.scatter_(1, tokens, whole.gather(1, tokens))
        found = assistant._logits(hidden)
        assert torch.equal(found.isinf(), expected.isinf())
        finite = ~expected.isinf()
        assert (found[finite] - expected[finite]).abs().max() < 1e-5


class TestReading:
    @pytest.mark.parametrize("groups", [None, 97])
    def test_a_folder_of_the_hub_is_read(self, tmp_path: Path, groups: int | None) -> None:
        model = gemma4()
        head = published(model, groups)
        save(head, tmp_path)
        found = read_published(str(tmp_path))
        assert found is not None
        assert found.strategy == "gemma_assistant"
        mine, theirs = build(head, model).state_dict(), build(found, model).state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())

    def test_a_head_that_is_there_twice_is_read_once(self) -> None:
        model = gemma4()
        head = published(model)
        table = head.tensors["model.embed_tokens.weight"]
        twice = dataclasses.replace(head, tensors={**head.tensors, "lm_head.weight": table})
        assert build(twice, model).state_dict().keys() == build(head, model).state_dict().keys()

    def test_it_takes_the_targets_dtype(self) -> None:
        model = gemma4()
        head = published(model)
        half = {name: tensor.bfloat16() for name, tensor in head.tensors.items()}
        assistant = build(dataclasses.replace(head, tensors=half), model)
        assert {weight.dtype for weight in assistant.parameters()} == {torch.float32}
