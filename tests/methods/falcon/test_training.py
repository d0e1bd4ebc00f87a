"""Training of Falcon heads: they learn the target's answers, and metrics are exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_spec import AssistantError, OptionError, UnsupportedError
from hf_spec.adapters.folder import load_adapter
from hf_spec.methods.falcon.csgd import CsgdSettings
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.falcon.training import (
    FalconTrainSettings,
    first_choices,
    train_falcon,
)
from hf_spec.training.features import Text, fused_layers, stored_texts, text_features
from hf_spec.training.held_out import acceptance, split_by_hash
from hf_spec.training.responses import Response
from hf_spec.training.trainer import CHECKPOINT, METRICS, TrainSettings
from tests.adapters.cards import card_metrics, rounded
from tests.tiny_models import build

CSGD = CsgdSettings(soft_weight=1.0, hard_weight=0.1)
SETTINGS = FalconTrainSettings(csgd=CSGD, vocabulary_size=60, held_back=0.3)
RUN = TrainSettings(epochs=30, batch_tokens=100, learning_rate=0.01, evaluate_every=1000)


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Text]:
    return stored_texts(model, responses, tmp_path / "features")


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "training" / METRICS).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.by_default(vocabulary_size=(60,))
@pytest.mark.parametrize(
    ("shape", "vocabulary_size"),
    [
        (FalconShape(2), 60),
        (FalconShape(3, num_layers=2), None),
        (FalconShape(1, fused=True), None),
        (FalconShape(2, recurrent=True), None),
    ],
)
def test_it_learns_and_drafts(
    model: PreTrainedModel,
    texts: list[Text],
    tmp_path: Path,
    shape: FalconShape,
    vocabulary_size: int | None,
) -> None:
    """Training and held-out sets share texts, so overfitting must improve the metrics."""
    twice = texts + [
        replace(t, response=replace(t.response, id=f"again {i}")) for i, t in enumerate(texts)
    ]
    if shape.fused:
        # Stored features are of the last state only, so compute them again.
        twice = [Text(text.response) for text in twice]
    settings = replace(SETTINGS, shape=shape, vocabulary_size=vocabulary_size, held_back=0.4)
    folder = tmp_path / "adapter"
    adapter = train_falcon(model, twice, folder, settings, replace(RUN, evaluate_every=10))
    metrics = rows(folder)
    losses = [row["loss"] for row in metrics]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    taus = [row["tau"] for row in metrics if "tau" in row]
    assert taus[-1] > taus[0] + 0.2
    assert adapter.options["held_back"].items() <= metrics[-1].items()
    assert card_metrics(folder) == rounded(adapter.options["held_back"])
    loaded = load_adapter(folder, "falcon")
    assert loaded.options == adapter.options
    assert loaded.options["max_depth"] == 8
    assert loaded.options["training"]["csgd"]["schedule"] == "paper"
    # Evaluating the saved head reproduces the reported metrics.
    head = FalconHead.from_adapter(loaded, model)
    _, held = split_by_hash(twice, 0.4, lambda text: text.response.id)
    again = acceptance(first_choices(head, model, held))
    for name, value in adapter.options["held_back"].items():
        assert again[name] == pytest.approx(value, abs=0.1)


def test_more_to_a_prompt_stays_on_its_side(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    """Every prompt has two answers, as if they came from two files."""
    other = [
        replace(t, response=replace(t.response, response=t.response.response[:6])) for t in texts
    ]
    other = [replace(t, features=t.features[: len(t.response.prompt) + 5]) for t in other]
    run = replace(RUN, epochs=1)
    adapter = train_falcon(model, texts + other, tmp_path, SETTINGS, run)
    learned, held = split_by_hash(texts + other, SETTINGS.held_back, lambda t: t.response.id)
    assert not {t.response.id for t in learned} & {t.response.id for t in held}
    assert adapter.options["training"]["texts"] == 2 * len(texts)


def test_features_on_the_fly_teach_the_same(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    run = replace(RUN, epochs=2)
    train_falcon(model, texts, tmp_path / "stored", SETTINGS, run)
    fresh = [Text(text.response) for text in texts]
    train_falcon(model, fresh, tmp_path / "fresh", SETTINGS, run)
    for one, other in zip(rows(tmp_path / "stored"), rows(tmp_path / "fresh"), strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05)


def test_resumed_equals_unbroken(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(RUN, epochs=3, save_every=2)
    whole = train_falcon(model, texts, tmp_path / "whole", SETTINGS, run)
    calls = 0
    original = torch.optim.AdamW.step

    def interrupted(self: torch.optim.AdamW, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_falcon(model, texts, tmp_path / "broken", SETTINGS, run)
    again = train_falcon(model, texts, tmp_path / "broken", SETTINGS, run)
    for name, tensor in whole.tensors.items():
        assert torch.equal(again.tensors[name], tensor)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")


@pytest.mark.full
def test_starting_from_a_head(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> None:
    first = train_falcon(model, texts, tmp_path / "first", SETTINGS, RUN)
    start = load_adapter(tmp_path / "first")
    still = replace(RUN, epochs=1, learning_rate=0.0)
    same = train_falcon(model, texts, tmp_path / "same", SETTINGS, still, start)
    for name, tensor in first.tensors.items():
        assert torch.equal(same.tensors[name], tensor)
    assert same.options["training"]["start"] == "first"
    more = train_falcon(model, texts, tmp_path / "more", SETTINGS, replace(RUN, epochs=1), start)
    assert any(not torch.equal(more.tensors[n], t) for n, t in first.tensors.items())
    fewer = replace(SETTINGS, vocabulary_size=20)
    narrow = train_falcon(model, texts, tmp_path / "narrow", fewer, still, start)
    assert len(narrow.tensors["vocabulary"]) == 20 < len(first.tensors["vocabulary"])
    keeping = replace(fewer, keep_vocabulary=True)
    kept = train_falcon(model, texts, tmp_path / "kept", keeping, still, start)
    assert torch.equal(kept.tensors["vocabulary"], first.tensors["vocabulary"])
    with pytest.raises(OptionError, match="requires a head to start from"):
        train_falcon(model, texts, tmp_path / "x", keeping, still)
    longer = replace(SETTINGS, shape=FalconShape(3))
    with pytest.raises(OptionError, match="to start from has the shape"):
        train_falcon(model, texts, tmp_path / "x", longer, RUN, start)
    with pytest.raises(AssistantError, match="trained for"):
        train_falcon(build("qwen2"), texts, tmp_path / "x", SETTINGS, RUN, start)


def test_a_head_that_becomes_fused(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    first = train_falcon(model, texts, tmp_path / "first", SETTINGS, replace(RUN, epochs=3))
    fresh = [Text(text.response) for text in texts]
    fused = replace(SETTINGS, shape=FalconShape(fused=True))
    still = replace(RUN, epochs=1, learning_rate=0.0)
    same = train_falcon(model, fresh, tmp_path / "same", fused, still, first)
    # The fused part starts at zero, so the head is unchanged.
    assert not same.tensors["earlier.up.weight"].any()
    for name, tensor in first.tensors.items():
        assert torch.equal(same.tensors[name], tensor)
    for name, value in first.options["held_back"].items():
        assert same.options["held_back"][name] == pytest.approx(value, abs=0.02)
    # `enter` scales the states to a root mean square of about 1.
    states = text_features(model, [texts[0].response], fused_layers(model))[0]
    entered = states[:, : -model.config.hidden_size].float() * same.tensors["earlier.enter"]
    assert 0.5 < float(entered.square().mean().sqrt()) < 2
    more = train_falcon(model, fresh, tmp_path / "more", fused, replace(RUN, epochs=2), same)
    assert more.tensors["earlier.up.weight"].any()
    with pytest.raises(OptionError, match="to start from has the shape"):
        train_falcon(model, texts, tmp_path / "x", SETTINGS, RUN, more)


def test_the_target_is_left_alone(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_falcon(model, texts, tmp_path, SETTINGS, replace(RUN, epochs=1))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_target_in_half_precision(texts: list[Text], tmp_path: Path) -> None:
    half = build("llama").__class__(build("llama").config).bfloat16().eval()
    half.load_state_dict(build("llama").state_dict())
    adapter = train_falcon(half, texts, tmp_path, SETTINGS, replace(RUN, epochs=2))
    assert all(t.dtype == torch.bfloat16 for t in adapter.tensors.values() if t.is_floating_point())
    saved = load_file(tmp_path / "training" / CHECKPOINT)
    assert all(t.dtype == torch.float32 for t in saved.values())
    assert rows(tmp_path)[-1]["loss"] < rows(tmp_path)[0]["loss"]


def test_too_few_texts(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="1 texts are too few"):
        train_falcon(model, texts[:1], tmp_path, SETTINGS, RUN)


def test_logits_changed_after_the_head_are_refused(texts: list[Text], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="final_logit_softcapping"):
        train_falcon(build("gemma2"), texts, tmp_path, SETTINGS, RUN)


class TestFirstChoices:
    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    def test_those_of_real_drafts(self, model: PreTrainedModel, texts: list[Text], k: int) -> None:
        """Choices equal those of one pass per root, over the pairs that generation would have."""
        torch.manual_seed(0)
        head = FalconHead(model, FalconShape(k), None).eval()
        head.start_plain(1.0)
        some = [texts[4], texts[0], texts[9]]
        for text, found in zip(some, first_choices(head, model, some), strict=True):
            line = [*text.response.prompt, *text.response.response]
            prompt_len = len(text.response.prompt)
            assert text.features is not None
            wanted = []
            for begin in range(max(prompt_len, k + 1), len(line)):
                # The root is the preceding token, which is in the last pair.
                tokens, features = torch.tensor([line[1:begin]]), text.features[: begin - 1]
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    out = head(tokens, features[None], (begin - 1) % k)[0, -k:]
                    drafted = head.head.draft_logits(out).argmax(dim=-1).tolist()
                right = line[begin : begin + k]
                wanted.append([a == b for a, b in zip(drafted, right, strict=False)])
            assert len(found) >= len(wanted)
            for row, expected in zip(found[len(found) - len(wanted) :], wanted, strict=True):
                assert row.tolist() == expected + [False] * (k - len(expected))

    def test_figures_counted_by_hand(self) -> None:
        matches = [
            torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [1, 0], [1, 0]]).bool(),
            torch.tensor([[0, 1], [1, 0]]).bool(),
        ]
        figures = acceptance(matches)
        assert figures["slot_1"] == pytest.approx(6 / 8)
        assert figures["slot_2"] == pytest.approx(4 / 8)
        assert figures["slot_2_given"] == pytest.approx(2 / 6)
        # First text: rounds at 0 and 3 accept 2 each. Second: rounds at 0 and 1 accept 0 and 1.
        assert figures["tau"] == pytest.approx(5 / 4)


def test_a_shape_that_does_not_fit_is_refused_before_the_target_runs(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    forward_passes: list[int] = []
    model.register_forward_hook(lambda *_: forward_passes.append(1))
    depth = model.config.num_hidden_layers
    deep = replace(SETTINGS, shape=FalconShape(num_layers=depth + 3))
    with pytest.raises(OptionError, match=f"num_layers={depth + 3}: .* has only {depth} layers"):
        train_falcon(model, texts, tmp_path, deep, RUN)
    assert not forward_passes
