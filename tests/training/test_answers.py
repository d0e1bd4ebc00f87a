"""Passes over answers: logits equal to plain forward passes, and shards computed once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import OptionError
from hf_spec.training import answers
from hf_spec.training.answers import (
    Example,
    answer_batches,
    answer_logits,
    stored,
    teacher_examples,
)
from hf_spec.training.responses import Response
from tests.tiny_models import build

FACTS = {"model": "tiny"}


def test_logits_are_those_of_plain_forwards(
    model: PreTrainedModel, responses: list[Response]
) -> None:
    batch = responses[:5]
    with torch.no_grad():
        found = answer_logits(model, batch).split([len(r.response) for r in batch])
        for response, logits in zip(batch, found, strict=True):
            text = torch.tensor([[*response.prompt, *response.response[:-1]]])
            expected = model(text).logits[0, len(response.prompt) - 1 :]
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_batches_keep_the_order_and_the_limit(
    responses: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FORWARD_TOKENS", 30)
    batches = list(answer_batches(responses))
    assert [r for batch in batches for r in batch] == responses
    assert max(len(batch) for batch in batches) > 1
    assert all(sum(len(r.response) for r in batch) <= 30 for batch in batches)
    long = replace(responses[0], response=[1] * 31)
    assert list(answer_batches([long, responses[1]])) == [[long], [responses[1]]]
    assert list(answer_batches([])) == []


class TestStored:
    """Shards of five answers, computed by a function that records its calls."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answers, "SHARD_RESPONSES", 5)
        self.calls: list[int] = []

    def compute(self, shard: Sequence[Response]) -> dict[str, Tensor]:
        self.calls.append(len(shard))
        return {"doubled": torch.tensor([2 * token for r in shard for token in r.response])}

    def run(self, folder: Path, responses: list[Response], **facts: str) -> None:
        pairs = list(stored(folder, "a pass", responses, {**FACTS, **facts}, self.compute))
        assert [response for response, _ in pairs] == responses
        for response, found in pairs:
            assert found["doubled"].tolist() == [2 * token for token in response.response]

    def test_every_answer_gets_its_part_once(
        self, responses: list[Response], tmp_path: Path
    ) -> None:
        self.run(tmp_path / "new", responses)
        assert self.calls == [5, 5, 5, 3]
        self.run(tmp_path / "new", responses)
        assert self.calls == [5, 5, 5, 3]
        names = sorted(path.name for path in (tmp_path / "new").iterdir())
        assert names == [f"a-pass-{i:05d}.safetensors" for i in range(4)]

    @pytest.mark.parametrize("size", [0, 5, -1])
    def test_a_shard_that_was_cut_off_is_named(
        self, responses: list[Response], tmp_path: Path, size: int
    ) -> None:
        self.run(tmp_path, responses)
        path = tmp_path / "a-pass-00001.safetensors"
        os.truncate(path, size % path.stat().st_size)
        with pytest.raises(OptionError, match=f"{path} is damaged .* it is computed again"):
            self.run(tmp_path, responses)
        path.unlink()
        self.run(tmp_path, responses)

    def test_an_interrupted_pass_goes_on(self, responses: list[Response], tmp_path: Path) -> None:
        iterator = stored(tmp_path, "a pass", responses, FACTS, self.compute)
        for _ in range(7):
            next(iterator)
        (tmp_path / "a-pass-00002.safetensors.part").write_bytes(b"half a file")
        self.run(tmp_path, responses)
        assert self.calls == [5, 5, 5, 3]

    def test_appended_answers_complete_the_last_shard(
        self, responses: list[Response], tmp_path: Path
    ) -> None:
        self.run(tmp_path, responses[:7])
        self.run(tmp_path, responses)
        assert self.calls == [5, 2, 3, 5, 3]

    def test_other_facts_or_answers_are_refused(
        self, responses: list[Response], tmp_path: Path
    ) -> None:
        self.run(tmp_path, responses)
        with pytest.raises(OptionError, match="another model: choose another folder"):
            self.run(tmp_path, responses, model="other")
        with pytest.raises(OptionError, match="another answers"):
            self.run(tmp_path, responses[::-1])
        with pytest.raises(OptionError, match="another answers"):
            self.run(tmp_path, [replace(responses[0], response=[1]), *responses[1:]])


class TestTeacherExamples:
    """Target probabilities: equal to a plain forward pass, computed once and stored."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Split the few answers into several shards and forward passes."""
        monkeypatch.setattr(answers, "SHARD_RESPONSES", 7)
        monkeypatch.setattr(answers, "FORWARD_TOKENS", 30)

    def test_they_are_the_probabilities_of_a_plain_forward(
        self, model: PreTrainedModel, responses: list[Response], tmp_path: Path
    ) -> None:
        examples = teacher_examples(model, responses, tmp_path / "t", top=4)
        assert [example.response for example in examples] == responses
        for example in examples:
            ids = torch.tensor([example.response.prompt + example.response.response[:-1]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(example.response.prompt) - 1 :]
            probs, tokens = logits.softmax(dim=-1).topk(4, dim=-1)
            assert torch.equal(example.top_tokens, tokens)
            # Log-probabilities are stored in float16.
            torch.testing.assert_close(example.top_probs, probs, rtol=5e-3, atol=1e-6)
            assert example.top_tokens[:, 0].tolist() == example.response.response

    def test_what_is_stored_is_read_back(
        self, model: PreTrainedModel, responses: list[Response], tmp_path: Path
    ) -> None:
        first = teacher_examples(model, responses[:10], tmp_path / "t", top=4)
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
        assert len(times) == 2
        again = teacher_examples(model, responses, tmp_path / "t", top=4)
        assert len(again) == len(responses)
        assert all(
            torch.equal(a.top_probs, b.top_probs) for a, b in zip(first, again, strict=False)
        )
        # Only the incomplete shard was rewritten.
        assert [path.stat().st_mtime_ns == time for path, time in sorted(times.items())] == [
            True,
            False,
        ]

    def test_another_run_is_refused(
        self, model: PreTrainedModel, responses: list[Response], tmp_path: Path
    ) -> None:
        teacher_examples(model, responses, tmp_path / "t", top=4)
        with pytest.raises(OptionError, match="another top"):
            teacher_examples(model, responses, tmp_path / "t", top=5)
        with pytest.raises(OptionError, match="another answers"):
            teacher_examples(model, responses[::-1], tmp_path / "t", top=4)
        with pytest.raises(OptionError, match="another weights"):
            teacher_examples(build("llama", seed=1), responses, tmp_path / "t", top=4)

    def test_an_answer_without_teacher(self) -> None:
        response = Response("p", "t", [5, 6], [7, 8, 9])
        example = Example.without_teacher(response)
        assert example.response == response
        assert example.top_tokens.shape == example.top_probs.shape == (3, 0)
        assert example.top_tokens.dtype == torch.int64
