"""Training DFlash heads: the loss, anchors, learning, resuming, and reading back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import BlockConfig, OptionError
from hf_spec.adapters.published import PublishedHead, known_head
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import build_block_head
from hf_spec.methods.block.runner import BlockRunner
from hf_spec.methods.block.training import (
    BlockLoss,
    draw_anchors,
    layout,
    start_head,
    train_block,
    trained_weights,
)
from hf_spec.training.features import Text, fused_layers, stored_texts
from hf_spec.training.pairs import read_pairs
from hf_spec.training.responses import Response
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch
from tests import head_training as checks
from tests.block_training import SETTINGS, one_block, published
from tests.feature_reference import deepspec, dflash, save, watch_drafts
from tests.tiny_models import prompts


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Text]:
    return stored_texts(model, responses, tmp_path / "features", fused_layers(model))


@pytest.fixture
def head(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> BlockHead:
    return start_head(published(model, texts, tmp_path), model, SETTINGS)


def test_the_loss_is_that_of_every_anchor(
    model: PreTrainedModel, texts: list[Text], head: BlockHead
) -> None:
    """Early tokens weigh more; tokens after the response are not learned."""
    settings = replace(SETTINGS, max_context=None)
    batch = MicroBatch(checks.computed(texts[:4]), seed=7)
    pairs = read_pairs(model, batch.items, 1, None, fused_layers(model))
    drawn, real = draw_anchors(pairs, 5, 7)
    assert real.all()
    expected, count = 0.0, 0
    ids: Any = head.output.vocabulary
    weights = [math.exp(-level / 4) for level in range(3)]
    for text, positions in zip(texts[:4], drawn.tolist(), strict=True):
        response = text.response
        tokens = [*response.prompt, *response.response]
        states, probs = checks.states_and_probs(model, tokens, ids)
        context = torch.cat([states[i] for i in head.shape.hidden_layers], dim=-1)
        for position in positions:
            assert len(response.prompt) - 2 <= position < len(tokens) - 2
            count += 1
            outputs = one_block(model, head, tokens, position, context)
            for level in range(3):
                drafted = position + 2 + level
                if drafted < len(tokens):
                    logits = head.logits(outputs[level + 1])
                    entropy = checks.entropy(probs[drafted - 1], logits)
                    expected += entropy * weights[level] / sum(weights)
    with torch.no_grad():
        loss, number = BlockLoss(head, model, settings)(batch)
    assert number == count == 20
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_anchors_are_different_random_places(model: PreTrainedModel, texts: list[Text]) -> None:
    pairs = read_pairs(model, texts[:3], 1, None, fused_layers(model))
    seen = set()
    for seed in range(40):
        positions, real = draw_anchors(pairs, 3, seed)
        assert real.all()
        assert all(len(set(row)) == 3 for row in positions.tolist())
        seen.update(positions[0].tolist())
    first, stop = pairs.span[0]
    assert seen == set(range(first, stop))
    positions, real = draw_anchors(pairs, 100, 0)
    assert real.sum(1).tolist() == pairs.counts


def test_it_learns(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> None:
    def train(folder: Path, run: TrainSettings) -> dict[str, float]:
        return train_block(model, checks.twice(texts), folder, settings, run)

    # Anchors at every position of the responses.
    settings = replace(SETTINGS, anchors=12)
    run = replace(checks.RUN, epochs=40)
    checks.check_learning(model, texts, train, "block", tmp_path, run)
    written = known_head(tmp_path / "head")
    assert written.config["speculators_config"]["algorithm"] == "dflash"
    proposal = written.config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 3
    assert written.config["draft_vocab_size"] == len(written.tensors["lm_head.weight"]) == 60
    ids = build_block_head(written, model).output.vocabulary
    assert ids is not None
    assert written.tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()


def test_a_resumed_training_is_the_same(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path, run: TrainSettings) -> dict[str, float]:
        return train_block(model, texts, folder, SETTINGS, run)

    checks.check_resuming(train, BlockLoss, tmp_path, monkeypatch)


def test_the_target_is_not_trained(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    # Other tests may have frozen the shared tiny model or left gradients in it.
    model.requires_grad_(True).zero_grad()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    train_block(model, texts, tmp_path, SETTINGS, replace(checks.RUN, epochs=1))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("from_anchor", [False, True])
def test_the_written_layout_is_read_back(
    from_anchor: bool, model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    """The written head has equal drafts for a ragged batch, and equal logits in two rounds."""
    initial = published(model, texts, tmp_path, sample_from_anchor=from_anchor)
    head = build_block_head(initial, model)
    trained = {name: weight.detach() for name, weight in trained_weights(head).items()}
    config, tensors = layout(head, initial, trained, model)
    folders = [
        save(tmp_path / name, PublishedHead("dflash", c, t, tmp_path, "x"))
        for name, c, t in (
            ("first", {**initial.config, "speculators_model_type": "dflash"}, initial.tensors),
            ("written", config, tensors),
        )
    ]
    drafts = []
    for folder in folders:
        with watch_drafts() as seen:
            model.generate(
                **prompts("llama", "ragged"),
                max_new_tokens=7,
                do_sample=False,
                spec_strategy=BlockConfig(children=2),
                assistant=folder,
            )
        drafts.append([(tree.tokens, tree.parent, texts) for tree, texts, _ in seen])
    assert len(drafts[0]) > 2
    assert drafts[0] == drafts[1]
    first, written = (two_rounds(model, known_head(folder)) for folder in folders)
    torch.testing.assert_close(written, first, atol=1e-5, rtol=1e-5)


def two_rounds(model: PreTrainedModel, published: PublishedHead) -> Tensor:
    """Return logits of all levels of two rounds, the second after three more tokens."""
    head, text = build_block_head(published, model), list(range(3, 15))
    states, _ = checks.states_and_probs(model, text, None)
    runner, found = BlockRunner(head, 1), []
    with runner.active():
        for begin, end in ((0, 8), (8, 11)):
            parts = [states[layer][begin:end] for layer in head.hidden_layers]
            runner.learn({0: (begin, end - begin)}, parts)
            proposed, token = runner.propose({0: text[end]}, head.num_levels), text[end]
            for _ in range(head.num_levels):
                found.append(proposed.after(torch.tensor([token]), torch.tensor([0]))[0])
                token = int(found[-1].argmax())
    return torch.stack(found)


class TestStart:
    def test_it_starts_where_the_saved_head_ended(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        run = replace(checks.RUN, epochs=10)
        ended = train_block(model, texts, tmp_path / "first", SETTINGS, run)
        still = replace(run, epochs=1, learning_rate=0.0)
        start = known_head(tmp_path / "first")
        same = train_block(model, texts, tmp_path / "same", SETTINGS, still, start)
        assert same == pytest.approx(ended, abs=0.05)
        written = known_head(tmp_path / "same")
        assert written.config["hf_spec"]["training"]["start"] == "first"
        assert all(torch.equal(t, start.tensors[name]) for name, t in written.tensors.items())

    def test_other_heads_are_refused(
        self, model: PreTrainedModel, texts: list[Text], tmp_path: Path
    ) -> None:
        head = published(model, texts, tmp_path)
        layers = list(fused_layers(model)[:-1])
        several = {"layers": tuple(layers)}
        kinds = ["sliding_attention", "full_attention"]
        sliding = {**head.config, "layer_types": kinds, "sliding_window": 4}
        sliding["use_sliding_window"] = True
        cases = [
            (head, {"block_size": 5}, "blocks of 4 and 2 layers, not 5 and 2; set block_size=4"),
            (head, {"num_layers": 1}, "set block_size=4 and num_layers=2"),
            (dflash(), {}, r"reads the layers \(0, 2\); training reads"),
            (replace(head, config=sliding), {}, "sliding or causal layers"),
            (deepspec(**several), {}, "family 'dspark', not 'dflash'"),
        ]
        for start, changes, reason in cases:
            with pytest.raises(OptionError, match=reason):
                start_head(start, model, replace(SETTINGS, **changes))
