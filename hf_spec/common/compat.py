"""Names of the KV cache argument in several transformers releases.

From transformers 5.24, models and `generate()` name it `cache`. Earlier releases, and remote code
written for them, name it `past_key_values`, or `cache_params` in models without attention.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput

# Names of the parameter, newest first.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Names of the cached length in position embeddings, newest first.
CACHE_LENGTH_NAMES = ("cache_length", "past_key_values_length")
# First and last release that the tests run with.
TESTED_VERSIONS = ("5.17", "5.24")

_FIELDS = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
# Name of the cache in `generate()`, in its arguments and in its outputs.
CACHE_NAME = next(name for name in CACHE_NAMES if name in _FIELDS)


def cache_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of a function's cache parameter, None without one."""
    parameters = inspect.signature(function).parameters
    for name in CACHE_NAMES:
        # XLM has an unrelated dictionary named `cache`.
        if name in parameters and (name != "cache" or "dict" not in _text(parameters[name])):
            return name
    return None


def _text(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def unknown_cache_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of a parameter that is annotated as a cache but is not in `CACHE_NAMES`."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in CACHE_NAMES and Cache.__name__ in _text(parameter):
            return name
    return None


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments under any name, None without one."""
    values = (arguments.get(name) for name in CACHE_NAMES)
    return next((value for value in values if value is not None), None)


def cache_argument(function: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return `cache` as keyword argument of a function, which may have only `**kwargs`."""
    return {cache_parameter(function) or CACHE_NAME: cache}


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without the cache."""
    return {name: value for name, value in arguments.items() if name not in CACHE_NAMES}


def output_cache(output: Any) -> Any:
    """Return the cache in the output of a model or of `generate()`, None without one."""
    names = (name for name in CACHE_NAMES if name in output)
    return next((output[name] for name in names), None)


def stored_tokens(cache: Any) -> int:
    """Return the number of tokens in a cache; 0 without attention layers."""
    # Recurrent states do not record their length.
    decoder_cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(decoder_cache, "layers", ())
    attends = any(isinstance(layer, CacheLayerMixin) for layer in layers)
    return int(cache.get_seq_length()) if attends else 0


def version_message() -> str:
    """Return the end of an error message about an unknown transformers interface."""
    first, last = TESTED_VERSIONS
    return (
        f"transformers {transformers.__version__} is installed, and hf_spec is tested with "
        f"{first} to {last}; install one of these"
    )
