"""Training of Medusa heads: loss, learning, resuming, and initial weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec import OptionError
from hf_spec.adapters.published import known_head
from hf_spec.methods.medusa.heads import MedusaHeads, build_medusa
from hf_spec.methods.medusa.settings import MedusaTrainSettings
from hf_spec.methods.medusa.training import LevelsLoss, new_heads, start_heads, train_medusa
from hf_spec.training.features import LAST, Text, stored_texts
from hf_spec.training.responses import Response
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch
from tests import head_training as checks
from tests.feature_reference import medusa
from tests.tiny_models import VOCAB

SETTINGS = MedusaTrainSettings(num_heads=3, vocabulary_size=60, held_back=0.4)


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Text]:
    return stored_texts(model, responses, tmp_path / "features", LAST)


@pytest.fixture
def heads(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> MedusaHeads:
    return noisy(build_medusa(new_heads(model, texts, SETTINGS, tmp_path), model))


def noisy(heads: MedusaHeads) -> MedusaHeads:
    generator = torch.Generator().manual_seed(3)
    for weight in heads.named_weights().values():
        weight.data += torch.randn(weight.shape, generator=generator) * 0.2
    return heads


def logits_of(heads: MedusaHeads, state: Tensor, level: int) -> Tensor:
    weights = heads.named_weights()
    linear, bias = (weights[f"{level}.0.linear.{name}"] for name in ("weight", "bias"))
    return weights[f"{level}.1.weight"] @ (state + F.silu(linear @ state + bias))


def test_the_loss_is_that_of_every_head_at_every_position(
    model: PreTrainedModel, texts: list[Text], heads: MedusaHeads
) -> None:
    """Head k reads the state of token i and predicts token i + k + 2 (k counts from 0)."""
    settings = replace(SETTINGS, max_context=None)
    expected, count = 0.0, 0
    for text in texts[:4]:
        response = text.response
        tokens = [*response.prompt, *response.response]
        states, probs = checks.states_and_probs(model, tokens, heads.vocabulary)
        for position in range(len(response.prompt) - 2, len(tokens) - 2):
            count += 1
            for level in range(3):
                drafted = position + 2 + level
                if drafted < len(tokens):
                    logits = logits_of(heads, states[-1][position], level)
                    weight = 0.8**level / (1 + 0.8 + 0.64)
                    expected += weight * checks.entropy(probs[drafted - 1], logits)
    with torch.no_grad():
        loss, tokens_learned = LevelsLoss(heads, model, settings)(
            MicroBatch(checks.computed(texts[:4]))
        )
    assert tokens_learned == count
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_learned_positions_alone_get_gradients(
    model: PreTrainedModel, texts: list[Text], heads: MedusaHeads
) -> None:
    """Gradients reach only the states of the learned positions."""
    response = texts[0].response
    features = torch.randn(response.num_tokens - 1, model.config.hidden_size, requires_grad=True)
    loss, _ = LevelsLoss(heads, model, SETTINGS)(MicroBatch([Text(response, features)]))
    loss.backward()
    assert features.grad is not None
    reached = features.grad.abs().sum(-1) > 0
    first = len(response.prompt) - 2
    # Only the teacher reads the last state.
    assert reached.tolist() == [first <= i < len(reached) - 1 for i in range(len(reached))]


def test_it_learns(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> None:
    def train(folder: Path, run: TrainSettings) -> dict[str, float]:
        return train_medusa(model, checks.twice(texts), folder, SETTINGS, run)

    checks.check_learning(model, texts, train, "heads", tmp_path)
    config = known_head(tmp_path / "head").config
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (VOCAB, 60)


def test_a_resumed_training_is_the_same(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path, run: TrainSettings) -> dict[str, float]:
        return train_medusa(model, texts, folder, SETTINGS, run)

    checks.check_resuming(train, LevelsLoss, tmp_path, monkeypatch)


class TestStart:
    def test_it_starts_where_the_saved_heads_ended(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        ended = train_medusa(model, texts, tmp_path / "first", SETTINGS, checks.RUN)
        still = replace(checks.RUN, epochs=1, learning_rate=0.0)
        start = known_head(tmp_path / "first")
        same = train_medusa(model, texts, tmp_path / "same", SETTINGS, still, start)
        assert same == pytest.approx(ended, abs=0.05)
        written = known_head(tmp_path / "same")
        assert written.config["hf_spec"]["training"]["start"] == "first"
        assert all(torch.equal(t, start.tensors[name]) for name, t in written.tensors.items())

    def test_the_targets_projection_is_copied(self, model: PreTrainedModel) -> None:
        heads = start_heads(medusa(1, projected=False), model, SETTINGS)
        own: Any = model.get_output_embeddings()
        weights = [heads.named_weights()[f"{level}.1.weight"] for level in range(3)]
        assert len({id(weight) for weight in (*weights, own.weight)}) == 4
        assert len({weight.data_ptr() for weight in (*weights, own.weight)}) == 4
        assert all(torch.equal(weight, own.weight) for weight in weights)

    def test_other_heads_are_refused(self, model: PreTrainedModel) -> None:
        with pytest.raises(OptionError, match="has 3 heads of 2 layers, not 3 of 1; set num_heads"):
            start_heads(medusa(2), model, SETTINGS)
        with pytest.raises(OptionError, match="family 'eagle3', not 'medusa'"):
            start_heads(replace(medusa(), family="eagle3"), model, SETTINGS)
