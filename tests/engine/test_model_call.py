"""Model calls with the argument names of the model's forward, and values of the result."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.model_call import ModelCall
from tests import tiny_models

TOKENS = torch.tensor([[5, 6, 7, 9]])
KEPT = torch.tensor([1, 3])


def call(model: PreTrainedModel, layers: list[int], vocab_size: int | None = None) -> Any:
    calling = ModelCall(model, layers, vocab_size)
    mask, positions = torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None]
    with torch.no_grad(), calling.active():
        result = calling(TOKENS, None, positions, mask, KEPT, use_cache=False)
        return calling, result, calling.hidden(result)


def plain(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(TOKENS, output_hidden_states=True, use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gptj", "bloom"])
def test_the_logits_are_those_of_the_kept_tokens(name: str) -> None:
    model = tiny_models.build(name)
    calling, result, _ = call(model, [])
    torch.testing.assert_close(calling.logits_of(result, KEPT), plain(model).logits[0, KEPT])


def test_on_several_devices_the_kept_tokens_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor would be on the device of the inputs, the states may be on another one."""
    model = tiny_models.build("llama")
    seen, inner = [], model.forward

    def forward(input_ids: Tensor, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        seen.append(logits_to_keep)
        return inner(input_ids, logits_to_keep=logits_to_keep, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    expected = plain(model).logits[0, KEPT]
    monkeypatch.setattr(model, "hf_device_map", {"model": 0, "lm_head": 1}, raising=False)
    calling, result, _ = call(model, [])
    assert seen[-1] == KEPT.tolist()
    torch.testing.assert_close(calling.logits_of(result, KEPT), expected)


def test_a_forward_that_keeps_all_logits_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    inner = model.forward

    def forward(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **kwargs: Any):  # type: ignore[no-untyped-def]
        assert "logits_to_keep" not in kwargs
        return inner(input_ids, attention_mask, position_ids, **kwargs)

    expected = plain(model).logits[0, KEPT]
    monkeypatch.setattr(model, "forward", forward)
    calling, result, _ = call(model, [])
    assert result.logits.shape[1] == 4
    torch.testing.assert_close(calling.logits_of(result, KEPT), expected)


def test_hidden_states_come_in_the_order_that_was_asked() -> None:
    model = tiny_models.build("llama")
    states = plain(model).hidden_states
    _, _, found = call(model, [BEFORE_NORM, -1, 1])
    with torch.no_grad():
        normed = model.model.norm(found[0])
    torch.testing.assert_close(normed, states[-1][0])
    torch.testing.assert_close(found[1], states[-1][0])
    torch.testing.assert_close(found[2], states[1][0])


def test_a_larger_vocabulary_is_filled_up() -> None:
    model = tiny_models.build("llama")
    own = model.config.vocab_size
    calling, result, _ = call(model, [], own + 3)
    logits = calling.fit_vocabulary(calling.logits_of(result, KEPT))
    assert logits.shape == (2, own + 3)
    assert bool((logits[:, own:] == -torch.inf).all())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_loss_of_a_router_is_not_computed(name: str) -> None:
    """It needs one mask entry per token of the sequence; a draft tree has none."""
    model = copy.deepcopy(tiny_models.build(name))
    model.config.output_router_logits = True
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    prompt = tiny_models.settled_prompt(name)
    plain = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options, spec_strategy="none"), plain)
    drafted = model.generate(prompt, **options, spec_strategy="draft", assistant=model)
    assert torch.equal(drafted, plain)


def test_a_model_without_routers_gets_no_option_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    seen, inner = [], model.forward

    @wraps(inner)
    def forward(**kwargs: Any) -> Any:
        seen.append(set(kwargs))
        return inner(**kwargs)

    monkeypatch.setattr(model, "forward", forward)
    call(model, [])
    assert "position_ids" in seen[0]
    assert "output_router_logits" not in seen[0]
