"""DISCO's features compared with manual arithmetic, and the classifier as an adapter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_spec.adapters.folder import BaseModel, load_adapter, save_adapter
from hf_spec.common.errors import AssistantError
from hf_spec.methods.disco.classifier import (
    FEATURES,
    NUM_FEATURES,
    DiscoClassifier,
    draft_features,
)
from tests.tiny_models import build


def by_hand(probs: list[float], position: int) -> list[float]:
    top = (sorted(probs, reverse=True) + [0.0] * 10)[:10]
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    return [*top, entropy, math.log(1 + position)]


def classifier(seed: int = 0, **options: object) -> DiscoClassifier:
    torch.manual_seed(seed)
    made = DiscoClassifier(**options)  # type: ignore[arg-type]
    made.fit_scaler(torch.rand(50, NUM_FEATURES))
    return made


class TestFeatures:
    @pytest.mark.parametrize("vocab", [3, 9, 10, 11, 200])
    def test_against_arithmetic_by_hand(self, vocab: int) -> None:
        torch.manual_seed(vocab)
        probs = torch.randn(4, vocab).mul(2).softmax(dim=-1)
        positions = [0, 1, 17, 500]
        features = draft_features(probs, torch.tensor(positions))
        expected = [by_hand(row, at) for row, at in zip(probs.tolist(), positions, strict=True)]
        assert features.dtype == torch.float32
        torch.testing.assert_close(features, torch.tensor(expected))

    def test_impossible_tokens_add_no_entropy(self) -> None:
        probs = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]])
        entropy = draft_features(probs, torch.tensor([0, 0]))[:, FEATURES["entropy"]]
        torch.testing.assert_close(entropy[:, 0], torch.tensor([math.log(2), 0.0]))

    def test_the_order_of_tokens_does_not_matter(self) -> None:
        probs = torch.randn(1, 50).softmax(dim=-1)
        shuffled = probs[:, torch.randperm(50)]
        position = torch.tensor([3])
        torch.testing.assert_close(
            draft_features(probs, position), draft_features(shuffled, position)
        )


class TestClassifier:
    def test_logits_are_those_of_two_layers_on_standardised_features(self) -> None:
        made, features = classifier(), torch.rand(7, NUM_FEATURES)
        scaled = (features - made.mean) / made.std
        inner = torch.relu(scaled @ made.inner.weight.T + made.inner.bias)
        expected = inner @ made.outer.weight[0] + made.outer.bias
        torch.testing.assert_close(made(features), expected)

    def test_the_scaler_leaves_constant_features_alone(self) -> None:
        made, features = DiscoClassifier(), torch.rand(20, NUM_FEATURES)
        features[:, 4] = 0.25
        made.fit_scaler(features)
        assert made.std[4] == 1
        scaled = (features - made.mean) / made.std
        torch.testing.assert_close(scaled.mean(dim=0), torch.zeros(NUM_FEATURES))
        assert scaled[:, 4].abs().max() < 1e-6


class TestAdapter:
    def test_round_trip(self, tmp_path: Path) -> None:
        model, made = build("llama"), classifier(hidden_size=5)
        save_adapter(tmp_path, made.to_adapter(BaseModel.of(model), threshold=0.3, draft="x/y"))
        adapter = load_adapter(tmp_path, "disco")
        loaded, features = DiscoClassifier.from_adapter(adapter), torch.rand(6, NUM_FEATURES)
        assert torch.equal(loaded(features), made(features))
        assert loaded.inner.out_features == 5
        assert adapter.options["threshold"] == 0.3
        assert adapter.options["draft"] == "x/y"
        assert not any(p.requires_grad for p in loaded.parameters())

    def test_options_and_tensors_that_do_not_fit(self) -> None:
        adapter = classifier().to_adapter(BaseModel.of(build("llama")))
        for options, message in (
            ({"hidden_size": 3}, r"inner.bias is \(32,\), not \(3,\)"),
            ({"features": ["entropy"]}, r"uses only some features \(\['entropy'\]\)"),
            ({"hidden_size": "wide"}, "hidden_size='wide'"),
        ):
            with pytest.raises(AssistantError, match=message):
                DiscoClassifier.from_adapter(
                    replace(adapter, options={**adapter.options, **options})
                )
        lacking = {name: t for name, t in adapter.tensors.items() if name != "mean"}
        with pytest.raises(AssistantError, match="mean is missing"):
            DiscoClassifier.from_adapter(replace(adapter, tensors=lacking))
