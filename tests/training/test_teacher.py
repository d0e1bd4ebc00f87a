"""The target's opinions: those of its plain forward, stored once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import OptionError
from hf_spec.training import answers
from hf_spec.training.responses import Response
from hf_spec.training.teacher import Example, teacher_examples


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards and forwards, out of few answers."""
    monkeypatch.setattr(answers, "SHARD_RESPONSES", 7)
    monkeypatch.setattr(answers, "FORWARD_TOKENS", 30)


def test_they_are_the_probabilities_of_a_plain_forward(
    model: PreTrainedModel, responses: list[Response], tmp_path: Path
) -> None:
    examples = teacher_examples(model, responses, tmp_path / "t", top=4)
    assert [example.response for example in examples] == responses
    for example in examples:
        ids = torch.tensor([example.response.prompt + example.response.response[:-1]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(example.response.prompt) - 1 :]
        probs, tokens = logits.softmax(dim=-1).topk(4, dim=-1)
        assert torch.equal(example.top_tokens, tokens)
        # Logarithms are stored with 11 bits.
        torch.testing.assert_close(example.top_probs, probs, rtol=5e-3, atol=1e-6)
        assert example.top_tokens[:, 0].tolist() == example.response.response


def test_what_is_stored_is_read_back(
    model: PreTrainedModel, responses: list[Response], tmp_path: Path
) -> None:
    first = teacher_examples(model, responses[:10], tmp_path / "t", top=4)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
    assert len(times) == 2
    again = teacher_examples(model, responses, tmp_path / "t", top=4)
    assert len(again) == len(responses)
    assert all(torch.equal(a.top_probs, b.top_probs) for a, b in zip(first, again, strict=False))
    # Only the shard that had room for more was made again.
    assert [path.stat().st_mtime_ns == time for path, time in sorted(times.items())] == [
        True,
        False,
    ]


def test_another_run_is_refused(
    model: PreTrainedModel, responses: list[Response], tmp_path: Path
) -> None:
    teacher_examples(model, responses, tmp_path / "t", top=4)
    with pytest.raises(OptionError, match="another top"):
        teacher_examples(model, responses, tmp_path / "t", top=5)
    with pytest.raises(OptionError, match="another answers"):
        teacher_examples(model, responses[::-1], tmp_path / "t", top=4)


def test_an_answer_without_opinion() -> None:
    response = Response("p", "t", [5, 6], [7, 8, 9])
    example = Example.without_opinion(response)
    assert example.response == response
    assert example.top_tokens.shape == example.top_probs.shape == (3, 0)
    assert example.top_tokens.dtype == torch.int64
