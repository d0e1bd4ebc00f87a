"""Features of whole texts: equal to plain forward passes, stored on disk, rejected on mismatch."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_spec import OptionError
from hf_spec.common.prompts import Prompt
from hf_spec.engine import runner
from hf_spec.training import answers
from hf_spec.training import features as module
from hf_spec.training.features import (
    LAST,
    FeatureRecorder,
    disk_need,
    in_words,
    num_features,
    stored_texts,
    text_features,
)
from hf_spec.training.responses import Response, generate_responses, read_responses
from tests.tiny_models import build
from tests.training.conftest import SETTINGS


def plain(model: PreTrainedModel, response: Response, layer: int = -1) -> torch.Tensor:
    ids = torch.tensor([[*response.prompt, *response.response[:-1]]])
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states[layer][0]


class TestTextFeatures:
    @pytest.mark.parametrize("layers", [(-1,), (1,), (0, 1, -1)])
    def test_they_are_those_of_plain_forwards(
        self, model: PreTrainedModel, responses: list[Response], layers: tuple[int, ...]
    ) -> None:
        found = text_features(model, responses[:5], layers)
        for response, states in zip(responses, found, strict=False):
            assert len(states) == num_features(response)
            expected = torch.cat([plain(model, response, layer) for layer in layers], dim=-1)
            torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)

    def test_long_texts_come_in_stretches(
        self,
        model: PreTrainedModel,
        responses: list[Response],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(runner, "PREFILL_CHUNK", 4)
        monkeypatch.setattr(runner, "STEP_TOKENS", 4)
        found = text_features(model, responses[:3])
        for response, states in zip(responses, found, strict=False):
            torch.testing.assert_close(states, plain(model, response), atol=1e-5, rtol=1e-4)

    def test_the_head_reads_the_answer_off_them(
        self, model: PreTrainedModel, responses: list[Response]
    ) -> None:
        (states,) = text_features(model, responses[:1])
        first = len(responses[0].prompt) - 1
        choice = model.get_output_embeddings()(states[first:]).argmax(dim=-1)
        assert choice.tolist() == responses[0].response


class TestStoredTexts:
    def test_written_once_in_bfloat16(
        self,
        model: PreTrainedModel,
        responses: list[Response],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(answers, "SHARD_RESPONSES", 5)
        texts = stored_texts(model, responses, tmp_path / "new")
        assert [text.response for text in texts] == responses
        for text in texts:
            assert text.features is not None
            assert text.features.dtype == torch.bfloat16
            expected = plain(model, text.response).bfloat16()
            torch.testing.assert_close(text.features, expected, atol=1e-2, rtol=1e-2)
        monkeypatch.setattr(module, "text_features", None)
        again = stored_texts(model, responses, tmp_path / "new")
        for one, other in zip(texts, again, strict=True):
            assert torch.equal(one.features, other.features)

    def test_the_need_is_what_the_files_take(
        self, model: PreTrainedModel, responses: list[Response], tmp_path: Path
    ) -> None:
        stored_texts(model, responses, tmp_path)
        taken = sum(file.stat().st_size for file in tmp_path.iterdir())
        need = disk_need(model, responses)
        assert need == sum(map(num_features, responses)) * model.config.hidden_size * 2
        assert need < taken < need + 4096

    def test_a_disk_without_room_is_refused(
        self,
        model: PreTrainedModel,
        responses: list[Response],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        usage = namedtuple("usage", "total used free")
        need = disk_need(model, responses)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, need - 1))
        with pytest.raises(OptionError, match="--no-store"):
            stored_texts(model, responses, tmp_path / "a" / "b")
        assert not (tmp_path / "a").exists()
        # Stored features need no further space.
        monkeypatch.undo()
        stored_texts(model, responses, tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 0))
        assert len(stored_texts(model, responses, tmp_path)) == len(responses)

    def test_other_answers_are_refused(
        self, model: PreTrainedModel, responses: list[Response], tmp_path: Path
    ) -> None:
        stored_texts(model, responses, tmp_path)
        with pytest.raises(OptionError, match="another answers"):
            stored_texts(model, [replace(responses[0], response=[3]), *responses[1:]], tmp_path)


class TestAnotherTarget:
    """Another target of the same name, such as a folder whose model was trained further."""

    def test_it_is_noticed_by_its_weights(
        self, model: PreTrainedModel, responses: list[Response], tmp_path: Path
    ) -> None:
        stored_texts(model, responses, tmp_path)
        with pytest.raises(OptionError, match="made with another weights: choose another folder"):
            stored_texts(build("llama", seed=1), responses, tmp_path)
        # The stored features are unchanged, and bfloat16 counts as the same target.
        assert len(stored_texts(model.bfloat16(), responses, tmp_path)) == len(responses)

    def test_files_that_know_its_name_alone(
        self,
        model: PreTrainedModel,
        responses: list[Response],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Files of older versions store only the name of the target."""
        with monkeypatch.context() as patch:
            patch.setattr(module, "target_facts", lambda model: {"target": "LlamaForCausalLM"})
            before = stored_texts(model, responses, tmp_path)
        monkeypatch.setattr(module, "text_features", None)
        assert len(stored_texts(model, responses, tmp_path)) == len(before)


def test_sizes_in_words() -> None:
    assert in_words(1_600_000_000) == "1.60 GB"
    assert in_words(2_500_000) == "2.5 MB"


@pytest.fixture(params=[LAST, (1, 0, *LAST)], ids=["last", "three"])
def layers(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Return the layers whose hidden states form the features."""
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
    """Record features of 18 answers, some shorter, in files of five and batches of four."""
    for changed in (answers, module):
        monkeypatch.setattr(changed, "SHARD_RESPONSES", 5)
    generate_responses(model, tokenizer, prompts[:6], tmp_path / "first.jsonl", SETTINGS)
    first, *_ = read_responses(tmp_path / "first.jsonl")
    model.generation_config.eos_token_id = first.response[4]
    folder = tmp_path / "answers.features"
    for known in (prompts[:7], prompts):
        # As after an interruption, a new recorder resumes in the middle of a file.
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
    original = module.text_features

    def watched(model: PreTrainedModel, batch: list, layers: tuple[int, ...]) -> list:
        computed.extend(response.id for response in batch)
        return original(model, batch, layers)

    monkeypatch.setattr(module, "text_features", watched)
    responses = list(read_responses(folder.with_name("answers.jsonl")))
    stored_texts(model, responses, folder, layers)
    # The second run resumed in the middle of the second file.
    assert computed == [f"p{n}" for n in range(7, 10)]
