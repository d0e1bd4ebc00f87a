"""Training of DISCO's classifier: observations, fitting, and evaluation metrics."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import OptionError
from hf_spec.adapters.folder import load_adapter
from hf_spec.methods.disco import training as disco
from hf_spec.methods.disco.classifier import DiscoClassifier, draft_features
from hf_spec.methods.disco.settings import DiscoTrainSettings
from hf_spec.methods.disco.training import (
    Observed,
    evaluate,
    fit,
    observe,
    round_positions,
    train_disco,
)
from hf_spec.training import answers
from hf_spec.training.responses import Response
from tests.adapters.cards import card_metrics, rounded
from tests.model_watch import count_forwards
from tests.tiny_models import VOCAB, build, draft_model

SETTINGS = DiscoTrainSettings(max_epochs=4, batch_size=64)


@pytest.fixture(scope="module")
def responses() -> list[Response]:
    """Return twelve prompts of two tasks with greedy responses of different lengths."""
    model, found = build("llama"), []
    generator = torch.Generator().manual_seed(3)
    for index in range(12):
        prompt = torch.randint(3, VOCAB, (1, 4 + index), generator=generator)
        text = model.generate(prompt, max_new_tokens=10 + index, do_sample=False)[0].tolist()
        task = "code" if index % 3 else "chat"
        found.append(Response(f"p{index}", task, text[: 4 + index], text[4 + index :]))
    return found


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several shards, several forward passes per shard, and several slices per pass."""
    monkeypatch.setattr(answers, "SHARD_RESPONSES", 5)
    monkeypatch.setattr(answers, "FORWARD_TOKENS", 40)
    monkeypatch.setattr(disco, "CHUNK_TOKENS", 7)


def learnable(count: int = 30, seed: int = 0) -> list[Observed]:
    """Return positions that are accepted if their largest probability is above 0.5."""
    torch.manual_seed(seed)
    found = []
    for index in range(count):
        features = torch.rand(40, 12)
        matched = features[:, 0] > 0.5
        found.append(Observed(f"p{index}", features, matched, matched.float()))
    return found


class TestObserve:
    @pytest.mark.usefixtures("small_shards")
    @pytest.mark.parametrize("labels", ["hard", "soft"])
    def test_every_position_after_the_targets_own_text(
        self, responses: list[Response], tmp_path: Path, labels: str
    ) -> None:
        model, draft = build("llama"), draft_model("llama")
        observed = observe(model, draft, responses, tmp_path, labels)
        assert [o.id for o in observed] == [r.id for r in responses]
        agreed = 0
        for response, seen in zip(responses, observed, strict=True):
            text = torch.tensor([response.prompt + response.response])
            before = slice(len(response.prompt) - 1, -1)
            with torch.no_grad():
                probs = draft(text).logits[0, before].softmax(dim=-1)
                wanted = model(text).logits[0, before].softmax(dim=-1)
            tokens = torch.tensor(response.response)
            assert wanted.argmax(dim=-1).tolist() == tokens.tolist()
            positions = torch.arange(len(tokens))
            torch.testing.assert_close(
                seen.features, draft_features(probs, positions), atol=1e-4, rtol=1e-4
            )
            assert seen.matched.tolist() == (probs.argmax(dim=-1) == tokens).tolist()
            variation = (probs - wanted).abs().sum(dim=-1) / 2
            expected = seen.matched.float() if labels == "hard" else 1 - variation
            torch.testing.assert_close(seen.labels, expected, atol=1e-4, rtol=1e-4)
            agreed += int(seen.matched.sum())
        assert 0 < agreed < sum(len(r.response) for r in responses)

    @pytest.mark.usefixtures("small_shards")
    def test_hard_labels_need_no_pass_of_the_target(
        self, responses: list[Response], tmp_path: Path
    ) -> None:
        with count_forwards(build("llama")) as calls:
            observe(build("llama"), draft_model("llama"), responses, tmp_path, "hard")
        assert calls == []

    @pytest.mark.usefixtures("small_shards")
    def test_a_run_that_was_cut_off_goes_on(
        self, responses: list[Response], tmp_path: Path
    ) -> None:
        draft = draft_model("llama")

        def run(folder: Path) -> Any:
            return observe(build("llama"), draft, responses, folder, "hard")

        whole = run(tmp_path / "whole")
        shards = sorted((tmp_path / "whole").iterdir())
        assert len(shards) == 3
        (tmp_path / "cut").mkdir()
        shutil.copy(shards[0], tmp_path / "cut")
        (tmp_path / "cut" / "observed-00001.safetensors.part").write_bytes(b"half a file")
        with count_forwards(draft) as calls:
            resumed = run(tmp_path / "cut")
            done = len(calls)
            again = run(tmp_path / "cut")
            assert 0 < done == len(calls), "what is there is read"
        for one, two, three in zip(whole, resumed, again, strict=True):
            assert torch.equal(one.features, two.features)
            assert torch.equal(two.features, three.features)
            assert torch.equal(one.labels, two.labels)
        assert [p.name for p in sorted((tmp_path / "cut").iterdir())] == [p.name for p in shards]

    def test_a_folder_of_another_run(self, responses: list[Response], tmp_path: Path) -> None:
        model, draft = build("llama"), draft_model("llama")
        observe(model, draft, responses, tmp_path, "hard")
        changed = [replace(responses[0], response=[5, 6]), *responses[1:]]
        for arguments, named in (
            ((model, draft_model("llama", 1), responses, tmp_path, "hard"), "draft"),
            ((model, draft, responses, tmp_path, "soft"), "labels"),
            ((model, draft, changed, tmp_path, "hard"), "answers"),
            ((build("llama", seed=4), draft, responses, tmp_path, "hard"), "target"),
        ):
            with pytest.raises(OptionError, match=f"another {named}: choose another folder"):
                observe(*arguments)


class TestFit:
    @pytest.mark.parametrize("class_weights", [True, False])
    def test_a_rule_that_can_be_learned_is_learned(self, class_weights: bool) -> None:
        settings = DiscoTrainSettings(
            class_weights=class_weights, learning_rate=1e-2, max_epochs=60, batch_size=128
        )
        classifier, history = fit(learnable(), learnable(8, seed=1), settings)
        figures = evaluate(classifier, learnable(8, seed=2), 0.5)["rules"]["disco"]
        assert figures["accepted"]["f1"] > 0.95
        assert figures["rejected"]["f1"] > 0.95
        assert history[-1] < history[0]

    def test_class_weights_lean_towards_the_rare_class(self) -> None:
        torch.manual_seed(0)
        features = torch.rand(600, 12)
        matched = torch.rand(600) < 0.1
        noise = [Observed("p", features, matched, matched.float())]
        share = {}
        for weigh in (True, False):
            classifier, _ = fit(noise, noise, replace(SETTINGS, class_weights=weigh, max_epochs=30))
            with torch.no_grad():
                share[weigh] = float(classifier(features).sigmoid().mean())
        assert share[True] > 0.4
        assert share[False] < 0.25

    def test_it_stops_early_and_keeps_the_best_epoch(self) -> None:
        learned, held = learnable(4), learnable(4, seed=1)
        # The validation labels are inverted, so the first epochs are the best.
        wrong = [replace(o, labels=1 - o.labels) for o in held]
        settings = DiscoTrainSettings(learning_rate=1e-2, max_epochs=80, patience=3)
        classifier, history = fit(learned, wrong, settings)
        assert len(history) == history.index(min(history)) + 1 + 3 < 80
        fewer = replace(settings, max_epochs=history.index(min(history)) + 1)
        best, _ = fit(learned, wrong, fewer)
        assert classifier.state_dict().keys() == best.state_dict().keys()
        for name, tensor in best.state_dict().items():
            assert torch.equal(classifier.state_dict()[name], tensor)

    def test_the_seed_decides_and_the_callers_stream_is_left_alone(self) -> None:
        def weights(seed: int) -> list[float]:
            classifier, _ = fit(learnable(4), learnable(2, 1), replace(SETTINGS, seed=seed))
            return classifier.inner.weight.flatten().tolist()

        torch.manual_seed(9)
        data = learnable(4), learnable(2, 1)
        torch.manual_seed(9)
        expected = torch.rand(3)
        torch.manual_seed(9)
        fit(*data, SETTINGS)
        assert torch.equal(torch.rand(3), expected)
        assert weights(0) == weights(0) != weights(1)


class TestFigures:
    def test_round_positions_begin_after_every_mismatch(self) -> None:
        matched = torch.tensor([1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
        assert round_positions(matched).tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2]

    def test_rules_against_counts_by_hand(self) -> None:
        matched = torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.bool)
        features = torch.zeros(6, 12)
        features[:, 0] = torch.tensor([0.9, 0.3, 0.5, 0.1, 0.4, 0.2])
        classifier = DiscoClassifier()
        with torch.no_grad():
            classifier.outer.weight.zero_()
            classifier.outer.bias.fill_(3.0)
        result = evaluate(classifier, [Observed("p", features, matched, matched.float())], 0.5)
        rules = result["rules"]
        assert result["acceptance"] == 0.5
        # The classifier predicts "accepted" everywhere.
        assert rules["disco"]["accepted"] == {"precision": 0.5, "recall": 1.0, "f1": 2 / 3}
        assert rules["disco"]["rejected"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
        # Rounds: 1 1 0 | 0 | 1 0; the first position of each is predicted to be accepted.
        assert rules["static 1"]["accepted"] == {
            "precision": 2 / 3,
            "recall": 2 / 3,
            "f1": 2 / 3,
        }
        assert rules["static 2"]["accepted"]["recall"] == 1.0
        assert rules["static 2"]["accepted"]["precision"] == 3 / 5
        assert rules["static 2"]["rejected"] == {"precision": 1.0, "recall": 1 / 3, "f1": 0.5}
        # 0.9, 0.5 and 0.4 reach the threshold; two of these positions match.
        assert rules["confidence"]["accepted"]["precision"] == 2 / 3


class TestTrain:
    def test_end_to_end(self, responses: list[Response], tmp_path: Path) -> None:
        model = build("llama")
        train_disco(model, {"truncated": 2}, responses, tmp_path / "a", SETTINGS)
        adapter = load_adapter(tmp_path / "a", "disco")
        options = adapter.options
        assert options["draft"] == {"truncated": 2}
        assert (options["threshold"], options["max_draft_tokens"]) == (0.5, 10)
        assert len(options["validation_prompts"]) == 2
        assert options["training"]["prompts"] == 10
        assert options["training"]["labels"] == "hard"
        validation = options["validation"]
        own = {
            f"{kind}.{name}": value
            for kind, figures in validation["rules"]["disco"].items()
            for name, value in figures.items()
        }
        assert card_metrics(tmp_path / "a") == rounded(
            {"acceptance": validation["acceptance"], **own}
        )
        assert {"disco", "confidence", "static 1", "static 5"} <= options["validation"][
            "rules"
        ].keys()
        ids = torch.tensor([responses[0].prompt])
        plain = model.generate(ids, max_new_tokens=12, do_sample=False)
        ours = model.generate(
            ids,
            max_new_tokens=12,
            do_sample=False,
            spec_strategy="disco",
            assistant=str(tmp_path / "a"),
            return_dict_in_generate=True,
        )
        assert torch.equal(ours.sequences, plain)
        assert ours.spec_stats.accepted_tokens > 0

    @pytest.mark.usefixtures("small_shards")
    def test_an_interrupted_run_ends_like_an_unbroken_one(
        self, responses: list[Response], tmp_path: Path
    ) -> None:
        model = build("llama")
        whole = train_disco(model, {"truncated": 2}, responses, tmp_path / "a", SETTINGS)
        (tmp_path / "b" / "training").mkdir(parents=True)
        first = tmp_path / "a" / "training" / "observed-00000.safetensors"
        shutil.copy(first, tmp_path / "b" / "training")
        resumed = train_disco(model, {"truncated": 2}, responses, tmp_path / "b", SETTINGS)
        assert resumed.options == whole.options
        for name, tensor in whole.tensors.items():
            assert torch.equal(resumed.tensors[name], tensor)

    def test_draft_models_are_named_or_not(self, responses: list[Response], tmp_path: Path) -> None:
        model, draft = build("llama"), copy.deepcopy(draft_model("llama"))
        draft.save_pretrained(tmp_path / "small")
        small = str(tmp_path / "small")
        named = train_disco(model, small, responses, tmp_path / "a", SETTINGS)
        assert named.options["draft"] == "../small"
        with pytest.raises(OptionError, match=r"is not beside .* pass a Hub id, or a link in"):
            train_disco(model, small, responses, tmp_path / "deep" / "a", SETTINGS)
        unnamed = train_disco(model, draft, responses, tmp_path / "b", SETTINGS)
        assert unnamed.options["draft"] is None
        cut = train_disco(model, "truncated:2", responses, tmp_path / "c", SETTINGS)
        assert cut.options["draft"] == {"truncated": 2}
        for name, tensor in named.tensors.items():
            assert torch.equal(unnamed.tensors[name], tensor)

    def test_tasks_choose_what_is_learned_from(
        self, responses: list[Response], tmp_path: Path
    ) -> None:
        settings = replace(SETTINGS, labels="soft")
        adapter = train_disco(
            build("llama"), {"truncated": 1}, responses, tmp_path, settings, tasks=["code"]
        )
        training_facts = adapter.options["training"]
        assert training_facts["tasks"] == ["code"]
        assert training_facts["prompts"] + len(adapter.options["validation_prompts"]) == 8
        assert training_facts["labels"] == "soft"
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert config["options"]["training"]["labels"] == "soft"

    def test_too_little_to_learn_from(self, responses: list[Response], tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="0 prompts with an answer are too few"):
            train_disco(
                build("llama"), {"truncated": 1}, responses, tmp_path, SETTINGS, tasks=["poems"]
            )
