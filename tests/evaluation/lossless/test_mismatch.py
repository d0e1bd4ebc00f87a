"""Explanations of mismatches: half-precision ties, bugs, and outputs that end elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.evaluation.lossless import mismatch
from hf_spec.evaluation.lossless.mismatch import BUG, TIE, UNSTABLE, differences, first_difference
from tests.tiny_models import build, repetitive_prompt

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def twins() -> PreTrainedModel:
    """Return a bfloat16 model in which every token has a twin with an equal LM head row."""
    model = copy.deepcopy(build("llama")).to(torch.bfloat16)
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        half = head.weight.shape[0] // 2
        head.weight[half : 2 * half] = head.weight[:half]
    return model


def plain(model: Any, prompt: Tensor) -> list[int]:
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()


def follow(model: Any, prompt: Tensor, changes: dict[int, Any]) -> list[int]:
    """Decode greedily, and apply `changes` (position -> function of the token) during decoding."""
    text = prompt
    for position in range(NEW_TOKENS):
        token = int(model(text).logits[0, -1].argmax())
        token = changes.get(position, lambda t: t)(token)
        text = torch.cat([text, torch.tensor([[token]])], dim=1)
    return text[0].tolist()


def twin(token: int) -> int:
    half = 97 // 2
    return token + half if token < half else token - half


def wrong(token: int) -> int:
    return (twin(token) + 1) % 97


def explained(model: Any, prompt: Tensor, got: list[int]) -> list[mismatch.Difference]:
    return list(differences(model, prompt, plain(model, prompt), got, NEW_TOKENS))


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [5]) == 0


def test_nothing_to_explain(twins: PreTrainedModel) -> None:
    prompt = repetitive_prompt()
    assert explained(twins, prompt, plain(twins, prompt)) == []


def test_ties_of_bfloat16_are_ties_and_what_follows_is_checked(twins: PreTrainedModel) -> None:
    prompt = repetitive_prompt()
    got = follow(twins, prompt, {2: twin, 7: twin})
    found = explained(twins, prompt, got)
    assert [one.kind for one in found] == [TIE, TIE]
    assert [one.position for one in found] == [2, 7]
    assert found[0].margin == 0.0
    assert found[0].token == twin(found[0].plain_token or 0)


def test_a_mistake_after_a_tie_is_found(twins: PreTrainedModel) -> None:
    prompt = repetitive_prompt()
    got = follow(twins, prompt, {2: twin, 5: wrong, 8: wrong})
    found = explained(twins, prompt, got)
    assert [(one.position, one.kind) for one in found] == [(2, TIE), (5, BUG)]
    assert found[1].margin > 2 * max(found[1].error, found[1].noise)
    assert "more than rounding" in found[1].reason


def test_float32_has_almost_no_ties() -> None:
    model, prompt = build("llama"), repetitive_prompt()
    (found,) = explained(model, prompt, follow(model, prompt, {4: wrong}))
    assert (found.position, found.kind) == (4, BUG)
    assert found.error < 1e-4


@pytest.mark.parametrize("change", [lambda tokens: tokens[:-3], lambda tokens: [*tokens, 5]])
def test_an_output_that_ends_elsewhere_is_a_mistake(change: Any) -> None:
    model, prompt = build("llama"), repetitive_prompt()
    got = change(plain(model, prompt))
    (found,) = explained(model, prompt, got)
    assert found.kind == BUG
    assert "ends where" in found.reason
    assert found.position == min(len(got) - prompt.shape[1], NEW_TOKENS)


def test_a_tie_that_ends_the_sequence(twins: PreTrainedModel) -> None:
    prompt = repetitive_prompt()
    got = follow(twins, prompt, {6: twin})
    end = prompt.shape[1] + 6
    ended = copy.copy(twins)
    ended.generation_config = copy.deepcopy(twins.generation_config)
    ended.generation_config.eos_token_id = got[end]
    if got[end] in got[prompt.shape[1] : end]:
        pytest.skip("the token came before")
    assert [one.kind for one in explained(ended, prompt, got[: end + 1])] == [TIE]
    assert [one.kind for one in explained(ended, prompt, got)] == [TIE, BUG]


def test_a_wrong_forward_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = build("llama"), repetitive_prompt()
    got = follow(model, prompt, {4: twin})
    right = mismatch._packed_logits

    def off(*arguments: Any) -> list[Tensor]:
        return [logits + 5.0 * torch.arange(len(logits)) for logits in right(*arguments)]

    monkeypatch.setattr(mismatch, "_packed_logits", off)
    (found,) = explained(model, prompt, got)
    assert found.kind == BUG
    assert "engine's logits are off" in found.reason


def test_plain_decoding_that_does_not_repeat_itself() -> None:
    model, prompt = build("llama"), repetitive_prompt()
    said = plain(model, prompt)
    position = prompt.shape[1] + 3
    other = [*said[:position], wrong(said[position]), *said[position + 1 :]]
    got = [*other[:-1], wrong(other[-1])]
    (found,) = list(differences(model, prompt, other, got, NEW_TOKENS))
    assert found.kind == UNSTABLE
