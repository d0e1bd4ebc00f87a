"""Training a truncated draft model: it learns the target's answers, and its metrics are exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import OptionError, UnsupportedError
from hf_spec.adapters.folder import load_adapter
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.draft_model.training import (
    DraftTrainSettings,
    acceptance,
    train_draft,
)
from hf_spec.training.answers import Example
from hf_spec.training.held_out import split_by_hash
from hf_spec.training.trainer import METRICS, TrainSettings
from tests.adapters.cards import card_metrics, rounded
from tests.tiny_models import build

SETTINGS = DraftTrainSettings(num_layers=2, rank=4, vocabulary_size=60, held_back=0.3)
RUN = TrainSettings(epochs=30, batch_tokens=100, learning_rate=0.02, evaluate_every=1000)


@pytest.mark.parametrize("vocabulary_size", [60, None])
def test_it_learns_and_drafts(
    model: PreTrainedModel,
    examples: list[Example],
    tmp_path: Path,
    vocabulary_size: int | None,
) -> None:
    settings = replace(SETTINGS, vocabulary_size=vocabulary_size)
    adapter = train_draft(model, examples, tmp_path / "adapter", settings, RUN)
    lines = (tmp_path / "adapter" / "training" / METRICS).read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    assert load_adapter(tmp_path / "adapter", "draft").options == adapter.options
    held_back = adapter.options["held_back"]
    assert card_metrics(tmp_path / "adapter") == rounded(held_back)
    assert held_back.items() <= json.loads(lines[-1]).items()
    # The metrics on held-out responses equal those of the loaded draft model.
    _, held = split_by_hash(examples, SETTINGS.held_back, lambda e: e.response.id)
    draft = resolve_draft_model("draft", tmp_path / "adapter", model)
    matches = []
    for example in held:
        text = torch.tensor([example.response.prompt + example.response.response[:-1]])
        with torch.no_grad():
            choice = draft(text).logits[0, len(example.response.prompt) - 1 :].argmax(dim=-1)
        matches.append(choice == torch.tensor(example.response.response))
    assert held_back["agreement"] == pytest.approx(acceptance(matches)["agreement"], abs=0.1)


def test_resumed_equals_unbroken(
    model: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    run = replace(RUN, epochs=2, save_every=2)
    whole = train_draft(model, examples, tmp_path / "whole", SETTINGS, run)
    train_draft(model, examples, tmp_path / "broken", SETTINGS, run)
    # The state after an interruption: a checkpoint, no adapter.
    (tmp_path / "broken" / "adapter_config.json").unlink()
    again = train_draft(model, examples, tmp_path / "broken", SETTINGS, run)
    for name, tensor in whole.tensors.items():
        assert torch.equal(again.tensors[name], tensor)


def test_the_target_is_left_alone(
    model: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_draft(model, examples, tmp_path, SETTINGS, replace(RUN, epochs=1))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_too_few_examples(model: PreTrainedModel, examples: list[Example], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="1 examples are too few"):
        train_draft(model, examples[:1], tmp_path, SETTINGS, RUN)


def test_logits_changed_after_the_head_are_refused(examples: list[Example], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="final_logit_softcapping"):
        train_draft(build("gemma2"), examples, tmp_path, SETTINGS, RUN)


class TestAcceptance:
    def test_tau_of_chains_counted_by_hand(self) -> None:
        matches = [torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool(), torch.tensor([0, 1]).bool()]
        figures = acceptance(matches)
        assert figures["agreement"] == pytest.approx(6 / 9)
        # Chains of 1: rounds at 0, 2, 3, 5 and at 0, 1 accept 1, 0, 1, 1 and 0, 1 tokens.
        assert figures["tau_1"] == pytest.approx(4 / 6)
        # Chains of 3: rounds at 0, 3 and at 0, 1 accept 2, 3 and 0, 1 tokens.
        assert figures["tau_3"] == pytest.approx(6 / 4)
