"""Training of MTP modules: learning, resuming, initial weights, and the written layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import MtpConfig, OptionError, UnsupportedError
from hf_spec.adapters.published import PublishedHead, known_head
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.feature_pairs.steps_loss import StepsLoss, draft_steps
from hf_spec.methods.mtp.head import build, build_from
from hf_spec.methods.mtp.settings import MtpTrainSettings
from hf_spec.methods.mtp.training import layout, named_weights, new_module, train_mtp
from hf_spec.training.features import LAST, Text, stored_texts
from hf_spec.training.responses import Response
from hf_spec.training.settings import TrainSettings
from tests import head_training as checks
from tests.feature_reference import save
from tests.mtp_reference import NAMES, Reference, qwen3_next, sample
from tests.tiny_models import build as build_model
from tests.tiny_models import prompts

SETTINGS = MtpTrainSettings(steps=3, held_back=0.4)


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Text]:
    return stored_texts(model, responses, tmp_path / "features", LAST)


def test_it_learns(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> None:
    def train(folder: Path, run: TrainSettings) -> dict[str, float]:
        return train_mtp(model, checks.twice(texts), folder, SETTINGS, run)

    checks.check_learning(model, texts, train, "mtp", tmp_path)
    written = known_head(tmp_path / "head")
    assert written.family == "mtp"
    assert written.config["num_nextn_predict_layers"] == 1
    assert written.config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert all(name.startswith("mtp_layers.0.") for name in written.tensors)


def test_a_resumed_training_is_the_same(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path, run: TrainSettings) -> dict[str, float]:
        return train_mtp(model, texts, folder, SETTINGS, run)

    checks.check_resuming(train, StepsLoss, tmp_path, monkeypatch)


def test_the_target_is_not_trained(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    # Earlier tests may have frozen the shared tiny model or left gradients on it.
    model.requires_grad_(True).zero_grad()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    train_mtp(model, texts, tmp_path, SETTINGS, replace(checks.RUN, epochs=1))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


@torch.no_grad()
def test_a_new_module_passes_the_state_to_the_last_layer(model: PreTrainedModel) -> None:
    head = build_from("a module", new_module(model), model)
    state = torch.randn(1, 3, model.config.hidden_size)
    projection: Any = head.joined["projection"]
    both = torch.cat([torch.zeros_like(state), state], dim=-1)
    torch.testing.assert_close(projection(both), state)
    normed = state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(head.joined["feature_norm"](state), normed)
    own = dict(model.model.layers[-1].named_parameters())
    layer = dict(head.attention.layers[0].named_parameters())
    assert own.keys() == layer.keys()
    assert all(torch.equal(weight, layer[name]) for name, weight in own.items())
    assert torch.equal(head.output_norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("kind", NAMES)
def test_every_layout_is_read_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A written module of any family drafts the same as the module in the target's own files."""
    found = sample("llama", kind)
    config, tensors = layout(found.head, dict(named_weights(found.head)), found.model, 3)
    written = PublishedHead("mtp", config, tensors, tmp_path, "a-module")
    original, drafts = PairDrafter.draft, list[Any]()

    def watched(self: Any, state: Any, limits: Any) -> Any:
        tree = original(self, state, limits)
        drafts[-1].append((tree.tokens, tree.parent, tree.node_probs))
        return tree

    monkeypatch.setattr(PairDrafter, "draft", watched)
    for assistant in (None, save(tmp_path, written)):
        drafts.append([])
        found.model.generate(
            **prompts("llama", "ragged"),
            max_new_tokens=8,
            do_sample=False,
            spec_strategy=MtpConfig(max_draft_tokens=3),
            assistant=assistant,
        )
    assert len(drafts[0]) > 2
    assert drafts[0] == drafts[1]
    again = build(known_head(tmp_path), found.model)
    plain, text = Reference(found), list(range(3, 12))
    states, _ = checks.states_and_probs(found.model, text, None)
    pairs = torch.tensor([text[1:]]), states[-1][None, :-1]
    with torch.no_grad():
        for step, outputs in enumerate(draft_steps(again, *pairs, 2)):
            for place in (4, 6):
                logits = again.head.draft_logits(outputs[0, place])
                root = place - step + 2
                expected = plain.logits(text[:root], text[root : place + 2])
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


class TestStart:
    def test_it_starts_where_the_saved_module_ended(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        run = replace(checks.RUN, epochs=5)
        ended = train_mtp(model, texts, tmp_path / "first", SETTINGS, run)
        still = replace(run, epochs=1, learning_rate=0.0)
        start = known_head(tmp_path / "first")
        same = train_mtp(model, texts, tmp_path / "same", SETTINGS, still, start)
        assert same == pytest.approx(ended, abs=0.05)
        written = known_head(tmp_path / "same")
        assert written.config["hf_spec"]["training"]["start"] == "first"
        assert all(torch.equal(t, start.tensors[name]) for name, t in written.tensors.items())

    @pytest.mark.parametrize("kind", ["index", "qwen"])
    def test_the_targets_own_module(self, kind: str, texts: list[Text], tmp_path: Path) -> None:
        """Training copies the module; the one in use stays unchanged."""
        found = sample("llama", kind)
        before = {name: weight.clone() for name, weight in named_weights(found.head).items()}
        run = replace(checks.RUN, epochs=1)
        train_mtp(found.model, texts, tmp_path, SETTINGS, run, found.head)
        assert all(torch.equal(w, before[name]) for name, w in named_weights(found.head).items())
        written = build(known_head(tmp_path), found.model)
        assert written.layout.switches == found.head.layout.switches
        changed = {
            name: not torch.equal(w, before[name]) for name, w in named_weights(written).items()
        }
        assert all(changed.values())
        record = known_head(tmp_path).config["hf_spec"]["training"]
        assert record["start"] == "the target's own module"

    def test_other_kinds_are_refused(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        other = PublishedHead("eagle3", {}, {}, tmp_path, "other")
        with pytest.raises(OptionError, match="family 'eagle3', not 'mtp'"):
            train_mtp(model, texts, tmp_path, SETTINGS, checks.RUN, other)


def test_norms_that_store_offsets_start_neutral() -> None:
    model = qwen3_next()
    weights = [t for name, t in new_module(model).items() if "hidden_layernorm" in name]
    assert [weight.abs().max().item() for weight in weights] == [0.0]


def test_layers_with_experts_are_refused(texts: list[Text], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="layer with experts"):
        train_mtp(qwen3_next(), texts, tmp_path, SETTINGS, checks.RUN)


def test_targets_of_another_form_are_refused(texts: list[Text], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no attributes `layers` and `norm`"):
        train_mtp(build_model("bloom"), texts, tmp_path, SETTINGS, checks.RUN)
