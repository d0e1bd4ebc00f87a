"""Features kept while answers are written: those that a pass over the finished texts computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_spec.common.prompts import Prompt
from hf_spec.training import answers, features, recorded
from hf_spec.training.features import LAST, stored_texts, text_features
from hf_spec.training.recorded import FeatureRecorder
from hf_spec.training.responses import generate_responses, read_responses
from tests.training.conftest import SETTINGS


@pytest.fixture(params=[LAST, (1, 0, *LAST)], ids=["last", "three"])
def layers(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Of which states the features are made."""
    return tuple(request.param)


@pytest.fixture
def folder(
    layers: tuple[int, ...],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[Prompt],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Features of eighteen answers, of which some end early, in files of five, batches of four."""
    for module in (answers, recorded):
        monkeypatch.setattr(module, "SHARD_RESPONSES", 5)
    generate_responses(model, tokenizer, prompts[:6], tmp_path / "first.jsonl", SETTINGS)
    first, *_ = read_responses(tmp_path / "first.jsonl")
    model.generation_config.eos_token_id = first.response[4]
    folder = tmp_path / "answers.features"
    for known in (prompts[:7], prompts):
        # As after an interruption: a new recorder goes on in the middle of a file.
        recorder = FeatureRecorder(model, folder, layers)
        out = tmp_path / "answers.jsonl"
        generate_responses(model, tokenizer, known, out, SETTINGS, 4, recorder=recorder)
    return folder


def test_they_are_those_of_the_finished_texts(
    model: PreTrainedModel, folder: Path, layers: tuple[int, ...]
) -> None:
    responses = list(read_responses(folder.with_name("answers.jsonl")))
    assert len({len(response.response) for response in responses}) > 1
    expected = text_features(model, responses, layers)
    for text, states in zip(stored_texts(model, responses, folder, layers), expected, strict=True):
        assert text.features is not None
        torch.testing.assert_close(text.features.float(), states, atol=0.02, rtol=0.01)


def test_only_what_an_interruption_lost_is_computed_again(
    model: PreTrainedModel,
    folder: Path,
    layers: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[str] = []
    original = features.text_features

    def watched(model: PreTrainedModel, batch: list, layers: tuple[int, ...]) -> list:
        computed.extend(response.id for response in batch)
        return original(model, batch, layers)

    monkeypatch.setattr(features, "text_features", watched)
    responses = list(read_responses(folder.with_name("answers.jsonl")))
    stored_texts(model, responses, folder, layers)
    # The second run began in the middle of the second file.
    assert computed == [f"p{n}" for n in range(5, 10)]
