"""Prefill with the model's own forward pass: when it is used, and the state after it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.compat import CACHE_NAME
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.runner import ModelRunner
from hf_spec.generation import own_prefill
from hf_spec.generation.own_prefill import Prompt, first_round
from hf_spec.methods.lookup.drafter import LookupConfig, LookupDrafter
from tests import hybrid_models, tiny_models
from tests.model_watch import count_forwards
from tests.refusals import refuse
from tests.targets import image_cases

LIMIT = 16


@cache
def longrope() -> PreTrainedModel:
    """Return a model whose rotary frequencies change past 16 tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 9.0, 20.0]}
    config = T.Phi3Config(
        **{**image_cases.TEXT, "max_position_embeddings": 128},
        original_max_position_embeddings=LIMIT,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": LIMIT,
            **factors,
        },
    )
    torch.manual_seed(0)
    model = T.Phi3ForCausalLM(config).eval()
    model.generation_config = T.GenerationConfig(pad_token_id=0)
    return model


def prompts(*lengths: int) -> dict[str, Tensor]:
    return tiny_models.ragged_batch(lengths)


@pytest.mark.parametrize("lengths", [(20,), (17, 40, 23)])
def test_longrope_past_its_limit_from_the_start(lengths: tuple[int, ...]) -> None:
    call: dict[str, Any] = {**prompts(*lengths), "max_new_tokens": 40, "do_sample": False}
    plain = longrope().generate(**call)
    draft = tiny_models.build("llama")
    for chosen in ({"spec_strategy": "lookup"}, {"spec_strategy": "tree", "assistant": draft}):
        assert torch.equal(longrope().generate(**call, **chosen), plain)


@pytest.mark.parametrize("lengths", [(10,), (16,), (20, 12)])
def test_longrope_that_would_change_on_the_way(lengths: tuple[int, ...]) -> None:
    refuse("past 16 tokens", model=longrope(), max_new_tokens=20, **prompts(*lengths))


@pytest.mark.parametrize("strategy", ["none", "lookup"])
def test_a_cache_that_was_filled_with_autograd_on(strategy: str) -> None:
    """Its tensors are results of autograd; plain `generate()` puts detached ones in their place."""
    model, ids = longrope(), tiny_models.repetitive_prompt(40)
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    outputs, caches = [], []
    for options in ({}, {"spec_strategy": strategy}):
        cache = T.DynamicCache(config=model.config)
        with torch.enable_grad():
            model(ids[:, :30], **{CACHE_NAME: cache}, use_cache=True)
        filled = cache.layers[0].keys
        assert filled.requires_grad
        before = filled.detach().clone()
        outputs.append(model.generate(ids, **{CACHE_NAME: cache}, **call, **options))
        assert torch.equal(filled, before)
        caches.append(cache)
    assert torch.equal(*outputs)
    for plain, ours in zip(*(cache.layers for cache in caches), strict=True):
        for expected, actual in ((plain.keys, ours.keys), (plain.values, ours.values)):
            assert not actual.requires_grad
            torch.testing.assert_close(actual, expected)


def test_a_cache_of_recurrent_layers_is_copied_detached() -> None:
    """Their states are in dictionaries, and the copy shares no memory with the cache."""
    model = hybrid_models.build("qwen3_next")
    cache = T.DynamicCache(config=model.config)
    with torch.enable_grad():
        model(tiny_models.repetitive_prompt(9), **{CACHE_NAME: cache}, use_cache=True)
    copied = own_prefill._copied(cache)
    pairs = list(zip(all_tensors(cache), all_tensors(copied), strict=True))
    assert any(original.requires_grad for original, _ in pairs)
    for original, other in pairs:
        assert torch.equal(original, other)
        assert not other.requires_grad
        assert other.data_ptr() != original.data_ptr()


def all_tensors(cache: T.DynamicCache) -> list[Tensor]:
    values = [value for layer in cache.layers for value in vars(layer).values()]
    values += [part for value in values if isinstance(value, dict) for part in value.values()]
    return [value for value in values if isinstance(value, Tensor)]


def test_longrope_in_continuous_batching() -> None:
    with pytest.raises(ValueError, match="separately"):
        longrope().generate_batch([[5] * 20], max_new_tokens=4, spec_strategy="lookup")


def test_text_models_do_not_take_it() -> None:
    ids = tiny_models.repetitive_prompt()
    mask = torch.ones_like(ids)
    for name in tiny_models.ARCHITECTURES:
        assert not own_prefill.is_needed(tiny_models.build(name), mask, {})


@pytest.mark.parametrize("name", image_cases.FAMILIES)
def test_a_prompt_of_text_takes_it_only_where_it_is_read_in_both_directions(name: str) -> None:
    ids = image_cases.without_images("one")["input_ids"]
    given = {"mm_encoder_outputs": {}, "mm_token_type_ids": torch.zeros_like(ids)}
    model = image_cases.build(name)
    needed = own_prefill.is_needed(model, torch.ones_like(ids), given)
    assert needed == (name == "paligemma")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, False),
        ({}, False),
        (torch.zeros(1, 3, dtype=torch.long), False),
        (torch.tensor([[0, 1]]), True),
        (torch.zeros(1, 3, 2, 2), True),
        ({"image": object()}, True),
    ],
)
def test_empty_inputs_say_nothing(value: Any, says: bool) -> None:
    assert own_prefill.has_content(value) == says


def test_the_round_leaves_what_an_ordinary_one_leaves() -> None:
    """KV cache, hidden states and first token equal those of the engine's prefill."""
    model, layers = tiny_models.build("llama"), (-1,)
    batch = prompts(9, 4)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    found = []
    for alone in (True, False):
        state = GenerationState.create(ids, mask, StopRules([], 2))
        drafter = LookupDrafter(LookupConfig())
        seen: list[Any] = []
        drafter.observe = lambda verdict, output, seen=seen: seen.append((verdict, output))  # type: ignore[method-assign]
        runner = ModelRunner(model, 2, layers)
        with torch.no_grad(), runner.active(), drafter.active(state):
            verifier = drafter.make_verifier([], 2)
            if alone:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                prompt = Prompt(ids, mask, {"attention_mask": mask, "position_ids": positions})
                first_round(prompt, runner, drafter, verifier, state)
            else:
                tree = drafter.draft(state, {0: 0, 1: 0})
                output = runner.forward(tree, state.tokens)
                verdict = verifier.verify(tree, output.logits, state)
                state.commit(verdict)
                runner.keep(verdict.paths)
                drafter.observe(verdict, output)
        verdict, output = seen[0]
        hidden = [output.hidden[-1][[*output.pending[row], output.nodes[row]]] for row in range(2)]
        found.append((state.tokens, runner.rows.stored, runner.forwards, hidden, runner))
    mine, usual = found
    assert mine[:3] == usual[:3]
    for one, other in zip(mine[3], usual[3], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert (mine[4].tokens_run, mine[4].padding_run) == (18, 5)
    for layer, keys in usual[4].rows.pool.keys.items():
        for row, length in enumerate(usual[1]):
            torch.testing.assert_close(
                mine[4].rows.pool.keys[layer][row, :, :length], keys[row, :, :length]
            )


def test_a_refused_draft_model_is_refused_before_the_first_forward() -> None:
    target, draft = image_cases.build("qwen3_vl"), image_cases.build("qwen2_vl")
    inputs = image_cases.with_images("qwen3_vl", "one")
    with (
        count_forwards(target, draft) as forwards,
        pytest.raises(ValueError, match=r"takes images like 'qwen2_vl'.*'qwen3_vl'.*text model"),
    ):
        target.generate(**inputs, max_new_tokens=4, spec_strategy="draft", assistant=draft)
    assert forwards == []
