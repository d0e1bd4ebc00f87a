"""The cache argument of models and `generate()` under each of its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Cache, DynamicCache

from hf_spec import UnsupportedError
from hf_spec.common.compat import (
    CACHE_NAME,
    CACHE_NAMES,
    TESTED_VERSIONS,
    cache_argument,
    cache_parameter,
    find_cache,
    output_cache,
    stored_tokens,
    unknown_cache_parameter,
    version_message,
    without_cache,
)
from hf_spec.generation.call_checks import check_inputs
from tests import hybrid_models
from tests.refusals import refuse
from tests.tiny_models import build

pytestmark = pytest.mark.smoke
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]])


class CachesAs(torch.nn.Module):
    """Module whose forward has one cache parameter, with a name used by a release."""

    def __init__(self, name: str):
        super().__init__()
        exec(f"def forward(input_ids, {name}=None): ...", space := {})
        self.forward = space["forward"]


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_every_name_of_the_parameter_is_known(name: str) -> None:
    forward, cache = CachesAs(name).forward, object()
    assert cache_parameter(forward) == name
    assert cache_argument(forward, cache) == {name: cache}
    assert find_cache({"input_ids": 1, name: cache}) is cache
    assert without_cache({"input_ids": 1, name: cache}) == {"input_ids": 1}


def test_a_function_without_a_cache_has_no_name_for_it() -> None:
    forward = CachesAs("attention_mask").forward
    assert cache_parameter(forward) is None
    assert find_cache({"input_ids": 1}) is None


def test_a_dictionary_of_that_name_is_no_cache() -> None:
    """XLM and Flaubert have a `cache` parameter that is a dictionary."""

    def forward(input_ids: Any, cache: dict[str, Any] | None = None) -> None: ...

    assert cache_parameter(forward) is None


def test_a_function_that_takes_any_argument_gets_the_name_of_the_release() -> None:
    assert cache_argument(lambda **kwargs: None, None) == {CACHE_NAME: None}


def test_the_installed_release_names_its_caches_alike() -> None:
    model = build("llama")
    assert cache_parameter(model.forward) == CACHE_NAME
    assert cache_parameter(model.prepare_inputs_for_generation) == CACHE_NAME
    output = model(PROMPT, use_cache=True)
    assert output_cache(output) is output[CACHE_NAME]
    assert output_cache(model(PROMPT, use_cache=False)) is None


@pytest.mark.parametrize("name", ["past_key_values", CACHE_NAME])
def test_generate_continues_from_a_cache_under_either_name(name: str) -> None:
    model = build("llama")
    call: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(PROMPT, **call)
    cache = DynamicCache(config=model.config)
    model(PROMPT[:, :5], **{CACHE_NAME: cache}, use_cache=True)
    found = model.generate(PROMPT, **call, **{name: cache}, spec_strategy="lookup")
    assert found.tolist() == expected.tolist()
    assert stored_tokens(cache) == found.shape[1] - 1


def test_a_cache_of_states_has_no_length() -> None:
    model = hybrid_models.build("mamba2")
    cache = DynamicCache(config=model.config)
    model(PROMPT, **cache_argument(model.forward, cache), use_cache=True)
    assert stored_tokens(cache) == 0
    assert stored_tokens(None) == 0


class Renamed(transformers.LlamaForCausalLM):
    """Model of a hypothetical release that renames the cache parameter again."""

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, past: Cache | None = None, **kwargs: Any
    ) -> Any:
        return super().forward(input_ids, **{CACHE_NAME: past}, **kwargs)


def test_an_unknown_name_is_told_from_a_model_without_a_cache() -> None:
    model = Renamed(build("llama").config).eval()
    assert unknown_cache_parameter(model.forward) == "past"
    refuse(
        f"takes the cache as past=.*transformers {transformers.__version__} is installed.*tested",
        model=model,
    )


def test_a_cache_that_generate_prepares_under_an_unknown_name_is_an_error() -> None:
    model = build("llama")
    kwargs = {"past": DynamicCache(config=model.config)}
    with pytest.raises(UnsupportedError, match=f"past .*transformers {transformers.__version__}"):
        check_inputs(model, PROMPT, torch.ones_like(PROMPT), kwargs, 20)


def test_the_tested_versions_are_those_of_the_project() -> None:
    installed = Version(transformers.__version__)
    first, last = map(Version, TESTED_VERSIONS)
    assert first <= Version(installed.base_version)
    assert f"tested with {first} to {last}" in version_message()
