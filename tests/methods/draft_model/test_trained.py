"""Trained draft models: a LoRA in copies of the first layers, with an unchanged target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import AssistantError, truncated_draft
from hf_spec.adapters.folder import SpecAdapter, load_adapter, save_adapter
from hf_spec.methods.draft_model.trained import TrainableDraft, draft_from_adapter
from hf_spec.methods.loading import build_adapter
from tests.tiny_models import build, repetitive_prompt

PROMPT = repetitive_prompt()
VOCABULARY = torch.tensor([2, 5, 7, 11, 40])


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(PROMPT).logits


def disturbed(name: str, vocabulary: Tensor | None = None) -> TrainableDraft:
    """Return a draft whose trained weights all differ from their initial values."""
    draft = TrainableDraft(build(name), 2, 4, vocabulary)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return draft


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "opt"])
class TestEveryArchitecture:
    def test_untrained_it_is_the_truncated_model(self, name: str) -> None:
        model = build(name)
        torch.testing.assert_close(
            logits(TrainableDraft(model, 2, 4, None).model), logits(truncated_draft(model, 2))
        )

    def test_the_target_is_not_touched(self, name: str) -> None:
        model = build(name)
        before, names = logits(model), [name for name, _ in model.named_modules()]
        draft = disturbed(name)
        assert not torch.equal(logits(draft.model), logits(truncated_draft(model, 2)))
        draft.merge()
        assert torch.equal(logits(model), before)
        assert [name for name, _ in model.named_modules()] == names

    def test_it_comes_back_from_its_folder(self, name: str, tmp_path: Path) -> None:
        draft = disturbed(name, VOCABULARY)
        trained = logits(draft.model)
        save_adapter(tmp_path, draft.to_adapter({"note": 1}))
        adapter = load_adapter(tmp_path, "draft")
        assert adapter.options == {"num_layers": 2, "rank": 4, "note": 1}
        found = logits(draft_from_adapter(adapter, build(name)))
        # Weights are stored in bfloat16.
        torch.testing.assert_close(found, trained, atol=0.05, rtol=0.05)
        others = [token for token in range(found.shape[-1]) if token not in VOCABULARY]
        assert (found[..., others] == float("-inf")).all()


def test_lora_final_norm_and_bridge_learn() -> None:
    draft = TrainableDraft(build("llama"), 2, 4, None)
    learning = [n for n, p in draft.model.named_parameters() if p.requires_grad]
    assert [n for n in learning if "lora_" not in n] == [
        "model.norm.weight",
        "lm_head.bridge.weight",
    ]
    # Seven linear layers in each of two decoder layers, each with two LoRA factors.
    assert len(learning) == 2 * 7 * 2 + 2


class TestDamage:
    @pytest.fixture
    def adapter(self) -> SpecAdapter:
        return disturbed("llama").to_adapter({})

    def test_a_weight_is_missing(self, adapter: SpecAdapter) -> None:
        name = next(iter(adapter.tensors))
        tensors = {n: t for n, t in adapter.tensors.items() if n != name}
        with pytest.raises(AssistantError, match=f"{name} is missing"):
            draft_from_adapter(replace(adapter, tensors=tensors), build("llama"))

    def test_a_size_is_missing(self, adapter: SpecAdapter) -> None:
        with pytest.raises(AssistantError, match="rank=None"):
            draft_from_adapter(replace(adapter, options={"num_layers": 2}), build("llama"))

    def test_another_base(self, adapter: SpecAdapter) -> None:
        with pytest.raises(AssistantError, match="other weights"):
            build_adapter(adapter, build("llama", seed=1))
