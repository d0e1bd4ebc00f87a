"""Training an EAGLE-3 head: its steps equal those of drafting, it learns, and it is read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import AssistantError, OptionError
from hf_spec.adapters.published import PublishedHead, known_head, read_published
from hf_spec.methods.eagle.head import EagleHead, build
from hf_spec.methods.eagle.settings import EagleTrainSettings
from hf_spec.methods.eagle.training import new_head, train_eagle
from hf_spec.methods.feature_pairs.steps_loss import StepsLoss, draft_steps
from hf_spec.training.features import Text, fused_layers, stored_texts
from hf_spec.training.held_out import acceptance, split_by_hash
from hf_spec.training.responses import Response
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import METRICS, MicroBatch
from tests import published_heads as heads

SETTINGS = EagleTrainSettings(steps=3, vocabulary_size=60, mlp_size=24, held_back=0.4)
RUN = TrainSettings(epochs=30, batch_tokens=100, learning_rate=0.01, evaluate_every=10)


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Text]:
    return stored_texts(model, responses, tmp_path / "features", fused_layers(model))


@pytest.fixture
def head(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> EagleHead:
    torch.manual_seed(0)
    return build(new_head(model, texts, SETTINGS, tmp_path), model)


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "training" / METRICS).read_text().splitlines()
    return [json.loads(line) for line in lines]


def loss_of(some: list[dict[str, float]]) -> float:
    """Return the mean loss per token."""
    return sum(row["loss"] * row["tokens"] for row in some) / sum(row["tokens"] for row in some)


def alone(head: EagleHead, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
    """Return a head's outputs from one pass over its whole input, without a cache."""
    mixed, _ = head.mix(torch.tensor([tokens]), features[None])
    length = len(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    return head.attend(mixed, attention_mask=mask, position_ids=torch.arange(length)[None])[0]


@torch.no_grad()
def test_steps_are_those_of_a_draft_from_every_position(head: EagleHead) -> None:
    """A draft reads true features up to its first position, then the head's own outputs."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (2, 7), generator=generator)
    features = torch.randn(2, 7, head.hidden_size, generator=generator)
    steps = list(draft_steps(head, tokens, features, 3))
    for row in range(2):
        for first in range(4):
            known = features[row, : first + 1]
            for step in range(3):
                line = tokens[row, : first + step + 1].tolist()
                expected = alone(head, line, known)[-1]
                found = steps[step][row, first + step]
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
                known = torch.cat([known, expected[None]])


def test_it_learns_drafts_and_is_read_back(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    """The training and held-out sets have the same texts, so overfitting must raise the metrics."""
    twice = texts + [
        replace(t, response=replace(t.response, id=f"again {i}")) for i, t in enumerate(texts)
    ]
    folder = tmp_path / "head"
    figures = train_eagle(model, twice, folder, SETTINGS, RUN)
    metrics = rows(folder)
    losses = [row["loss"] for row in metrics]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    taus = [row["tau"] for row in metrics if "tau" in row]
    assert taus[-1] > taus[0] + 0.2
    assert figures.items() <= metrics[-1].items()
    card = (folder / "README.md").read_text()
    assert f"| `tau` | {figures['tau']:.4f} |" in card
    published = read_published(folder)
    assert published is not None
    assert published.family == "eagle3"
    assert published.config["hf_spec"]["training"]["steps"] == 3
    kinds = {t.dtype for t in published.tensors.values() if t.is_floating_point()}
    assert kinds == {torch.bfloat16}
    _, held = split_by_hash(twice, 0.4, lambda text: text.response.id)
    again = acceptance(StepsLoss(build(published, model), model, SETTINGS).matches(held))
    for name, value in figures.items():
        assert again[name] == pytest.approx(value, abs=0.1)
    # The metrics are for greedy chains of three; a generation on a held-out prompt confirms them.
    response = held[0].response
    out = model.generate(
        torch.tensor([response.prompt]),
        max_new_tokens=len(response.response),
        do_sample=False,
        return_dict_in_generate=True,
        spec_strategy="eagle",
        assistant=str(folder),
    )
    assert out.sequences[0, len(response.prompt) :].tolist() == response.response
    assert out.spec_stats.tau > 0.2


def test_features_on_the_fly_teach_the_same(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    run = replace(RUN, epochs=2)
    train_eagle(model, texts, tmp_path / "stored", SETTINGS, run)
    train_eagle(model, [Text(t.response) for t in texts], tmp_path / "fresh", SETTINGS, run)
    for one, other in zip(rows(tmp_path / "stored"), rows(tmp_path / "fresh"), strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05)


def test_other_answers_or_another_target_do_not_go_on(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    """The same number of other responses is rejected: responses determine the head's vocabulary."""
    run = replace(RUN, epochs=1)
    train_eagle(model, texts, tmp_path, SETTINGS, run)
    train_eagle(model, texts, tmp_path, SETTINGS, run)
    first = replace(texts[0].response, response=[3, *texts[0].response.response[1:]])
    with pytest.raises(OptionError, match="other settings: answers="):
        train_eagle(model, [Text(first), *texts[1:]], tmp_path, SETTINGS, run)
    model.config.name_or_path = "another"
    with pytest.raises(OptionError, match=r"other settings: target=.* \(now 'another'\)"):
        train_eagle(model, texts, tmp_path, SETTINGS, run)


class TestGoingOn:
    def test_it_starts_where_the_saved_head_ended(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        """At a learning rate of 0 the loss is the saved head's; training reduces it further."""
        ended = train_eagle(model, texts, tmp_path / "first", SETTINGS, RUN)
        first = rows(tmp_path / "first")
        per_epoch = len(first) // RUN.epochs
        still = replace(RUN, epochs=1, learning_rate=0.0)
        start = known_head(tmp_path / "first")
        same = train_eagle(model, texts, tmp_path / "same", SETTINGS, still, start)
        assert same == pytest.approx(ended, abs=0.05)
        fresh = loss_of(first[:per_epoch])
        saved = loss_of(rows(tmp_path / "same"))
        # The weights of the saved head are those of the last step, in bfloat16.
        assert saved == pytest.approx(loss_of(first[-per_epoch:]), rel=0.02)
        assert saved < fresh - 1
        train_eagle(model, texts, tmp_path / "more", SETTINGS, replace(RUN, epochs=16), start)
        assert loss_of(rows(tmp_path / "more")[-per_epoch:]) < saved
        written = known_head(tmp_path / "more")
        assert written.config["hf_spec"]["training"]["start"] == "first"
        assert written.config.keys() == start.config.keys()
        assert {k: v.shape for k, v in written.tensors.items()} == {
            k: v.shape for k, v in start.tensors.items()
        }
        assert torch.equal(written.tensors["d2t"], start.tensors["d2t"])

    def test_from_another_layout(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        """Written files have one layout, and include tensors that were not trained."""
        config = {**heads.plain_config(), "eagle_aux_hidden_state_layer_ids": [2, 1, 0]}
        tensors = known_head(heads.sample().folder).tensors
        start = PublishedHead("eagle3", config, tensors, tmp_path, "somebody's")
        settings = replace(SETTINGS, vocabulary_size=heads.KNOWN, mlp_size=None)
        train_eagle(model, texts, tmp_path / "mine", settings, replace(RUN, epochs=1), start)
        written = known_head(tmp_path / "mine")
        assert written.config["speculators_model_type"] == "eagle3"
        assert torch.equal(written.tensors["d2t"], tensors["d2t"])
        assert build(written, model).spec.layer["intermediate_size"] == heads.INNER

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"vocabulary_size": 50}, "drafts 60 of .* vocabulary_size is 50; set it to 60"),
            ({"vocabulary_size": None}, "vocabulary_size is None; set it to 60"),
            ({"mlp_size": 32}, "has an MLP of width 24, but mlp_size is 32"),
        ],
    )
    def test_other_sizes_are_refused(
        self,
        changes: dict[str, Any],
        reason: str,
        model: PreTrainedModel,
        texts: list[Text],
        tmp_path: Path,
    ) -> None:
        start = new_head(model, texts, SETTINGS, tmp_path)
        with pytest.raises(OptionError, match=reason):
            train_eagle(model, texts, tmp_path / "x", replace(SETTINGS, **changes), RUN, start)
        assert not (tmp_path / "x").exists()

    def test_other_kinds_and_targets_are_refused(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        made = new_head(model, texts, SETTINGS, tmp_path)
        others = [
            (replace(made, family="peagle"), "family 'peagle', not 'eagle3'"),
            (replace(made, overrides=(("aux_layers", (2, 1, 1)),)), r"layers \(2, 1, 1\)"),
        ]
        for start, reason in others:
            with pytest.raises(OptionError, match=reason):
                train_eagle(model, texts, tmp_path / "x", SETTINGS, RUN, start)
        narrow = heads.random_tensors(heads.sizes(target=heads.WIDTH + 2))
        start = PublishedHead("eagle3", heads.plain_config(), narrow, tmp_path, "narrow")
        with pytest.raises(AssistantError, match="is for another target"):
            train_eagle(model, texts, tmp_path / "x", SETTINGS, RUN, start)


def test_later_steps_weigh_less(model: PreTrainedModel, texts: list[Text], head: EagleHead) -> None:
    batch = MicroBatch(texts[:3])
    with torch.no_grad():
        losses = {
            (steps, weight): float(
                StepsLoss(head, model, replace(SETTINGS, steps=steps, step_weight=weight))(batch)[0]
            )
            for steps, weight in ((1, 0.5), (2, 0.5), (2, 1.0))
        }
    second = 2 * losses[2, 1.0] - losses[1, 0.5]
    assert losses[2, 0.5] == pytest.approx((losses[1, 0.5] + 0.5 * second) / 1.5, rel=1e-5)


def test_a_new_head_begins_as_the_last_layer(model: PreTrainedModel, head: EagleHead) -> None:
    last = model.model.layers[-1]
    width = model.config.hidden_size
    own = head.attention.layers[0]
    torch.testing.assert_close(own.self_attn.q_proj.weight[:, width:], last.self_attn.q_proj.weight)
    torch.testing.assert_close(own.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
    torch.testing.assert_close(own.mlp.up_proj.weight, last.mlp.up_proj.weight[:24])
    torch.testing.assert_close(head.attention.norm.weight, model.model.norm.weight)
    states = [torch.randn(2, width) for _ in range(3)]
    torch.testing.assert_close(head.fuse(states), states[-1])


def test_a_step_must_weigh_something() -> None:
    with pytest.raises(OptionError, match="step_weight=0"):
        EagleTrainSettings(step_weight=0.0)
