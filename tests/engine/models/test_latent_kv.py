"""Models that cache latents, while draft trees store the keys and values computed from them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import DeepseekV3ForCausalLM, DynamicCache

from hf_spec import DraftTree, UnsupportedError
from hf_spec.common.compat import CACHE_NAME, output_cache
from hf_spec.engine.models.latent_kv import caches_latents, expanded
from hf_spec.engine.runner import ModelRunner
from tests import any_class, hybrid_models
from tests.tiny_models import ARCHITECTURES, build, prompts, ragged_batch

OURS = ["deepseek_v3"]
pytestmark = pytest.mark.skipif(
    not caches_latents(build("deepseek_v3")), reason="older transformers cache no latents"
)


def test_which_models_do() -> None:
    assert [name for name in ARCHITECTURES if caches_latents(build(name))] == OURS
    assert caches_latents(hybrid_models.build("kimi_linear"))


@pytest.mark.parametrize("name", [*OURS, "kimi_linear", "llama"])
def test_a_cache_of_the_model_becomes_what_trees_store(name: str) -> None:
    """Expand the cache of a prompt that the model prefilled itself."""
    model = build(name) if name in ARCHITECTURES else hybrid_models.build(name)
    text = prompts("llama", "one")["input_ids"][0].tolist()
    runner = ModelRunner(model, 1)
    with torch.no_grad(), runner.active():
        runner.forward(DraftTree.from_rows([([text[-1]], [-1])]), [text])
        cache = output_cache(model(torch.tensor([text]), use_cache=True))
        found = expanded(model, cache)
    assert (found is cache) == (name == "llama")
    for index, keys in runner.rows.pool.keys.items():
        for ours, theirs in [
            (keys, found.layers[index].keys),
            (runner.rows.pool.values[index], found.layers[index].values),
        ]:
            torch.testing.assert_close(ours[:, :, : len(text)], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_a_cache_of_the_user_is_refused(name: str) -> None:
    prompt = prompts(name, "one")
    with pytest.raises(UnsupportedError, match="caches latents"):
        build(name).generate(
            **prompt,
            **{CACHE_NAME: DynamicCache(config=build(name).config)},
            max_new_tokens=4,
            spec_strategy="lookup",
        )


@pytest.mark.parametrize("name", OURS)
def test_no_cache_is_returned(name: str) -> None:
    output = build(name).generate(
        **prompts(name, "one"),
        max_new_tokens=4,
        do_sample=False,
        spec_strategy="lookup",
        return_dict_in_generate=True,
    )
    assert output_cache(output) is None


def test_a_prompt_that_the_model_runs_by_itself() -> None:
    """Past the limit of its rotary frequencies the model prefills, and its cache is loaded."""
    config = copy.deepcopy(build("deepseek_v3").config)
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 3.0, 9.0, 20.0],
    }
    model = DeepseekV3ForCausalLM(config).eval()
    model.load_state_dict(build("deepseek_v3").state_dict())
    call = {**ragged_batch((17, 30)), "max_new_tokens": 20, "do_sample": False}
    call["pad_token_id"] = 0
    expected = model.generate(**call, eos_token_id=None)
    assert torch.equal(model.generate(**call, eos_token_id=None, spec_strategy="lookup"), expected)


def test_layers_that_share_latents() -> None:
    """Each layer computes its own keys and values from the shared latents."""
    name = "MistralLarge4ForConditionalGeneration"
    config = copy.deepcopy(any_class.build("mistral_large4", name).config)
    config.text_config.kv_source_layers = [0, 0, 2, 3]
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    call = {**ragged_batch((17, 30)), "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**call, pad_token_id=0, eos_token_id=None)
    found = model.generate(**call, pad_token_id=0, eos_token_id=None, spec_strategy="lookup")
    assert torch.equal(found, expected)
