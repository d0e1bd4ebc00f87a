"""Validation of a request against the limits of the server, before generation starts.

Endpoints write body fields into a generation config, and a request may contain a config itself. So
most limits and ranges are checked on the config, once for all endpoints.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.generation.hook import STORED
from hf_spec.serving.settings import ServeSettings

# Maximum length of prompt and output if neither the model nor the settings have a limit.
MAX_LENGTH = 32768
# Maximum number of values in one setting, such as the ids of `bad_words_ids`. The time of some
# processors is proportional to it in every step of the whole batch.
MAX_VALUES = 4096
MAX_NUMBER = 2**31 - 1
# Logits are divided by the temperature in float32; 0 means greedy decoding.
MIN_TEMPERATURE = 1e-3

# Settings that are set by a field of another name.
FIELDS = {"sequence_bias": "logit_bias (sequence_bias)"}
# Settings that contain token ids.
TOKEN_SETTINGS = {
    "bos_token_id",
    "pad_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "force_words_ids",
}
# Bounds that transformers does not check in the config.
RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, MAX_NUMBER),
    "min_p": (0.0, 1.0),
    "top_h": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "epsilon_cutoff": (0.0, 1.0),
    "eta_cutoff": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "encoder_repetition_penalty": (0.01, 100.0),
    "no_repeat_ngram_size": (0, 1024),
    "encoder_no_repeat_ngram_size": (0, 1024),
    # Each of these multiplies the compute and memory of a request.
    "num_return_sequences": (1, 1),
    "num_beams": (1, 1),
    "num_beam_groups": (1, 1),
}


def check_body(body: Mapping[str, Any], settings: ServeSettings) -> None:
    """Check the fields of a body against the server settings; raises `OptionError`."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if settings.max_tokens is not None and (body.get(name) or 0) > settings.max_tokens:
            raise OptionError(
                f"{name}={body[name]}: the output may have {settings.max_tokens} tokens"
            )
    # Chat templates are rejected, and template variables that are call arguments.
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name, value in (body.get("chat_template_kwargs") or {}).items():
        if name == "chat_template":
            if not settings.client_templates:
                raise OptionError(
                    f"chat_template_kwargs contains chat_template={value!r:.60}: this server uses "
                    "its model's template; start it with --trust-request-chat-template to allow "
                    "others"
                )
        elif name in arguments:
            raise OptionError(
                f"chat_template_kwargs contains {name}={value!r:.60}: this is an argument of the "
                "call, not a template variable; leave it out"
            )
    if body.get("generation_config") is not None:
        _check_config_text(body["generation_config"])


def _check_config_text(text: str) -> None:
    config = json.loads(text)
    if not isinstance(config, dict):
        raise OptionError(f"generation_config={text!r:.60} must be the JSON of an object")
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    if unknown := sorted(config.keys() - settings - STORED.keys()):
        raise OptionError(f"generation_config contains {unknown[0]!r:.60}, which is not a setting")


def check_config(config: GenerationConfig, model: PreTrainedModel, settings: ServeSettings) -> None:
    """Check every setting that differs from the model's generation config.

    Raises `OptionError` with the setting, its value and the allowed values.
    """
    vocab = vocabulary_size(model)
    for name, value in vars(config).items():
        default = getattr(model.generation_config, name, None)
        if name.startswith("_") or value is None or value == default:
            continue
        wrong = f"{FIELDS.get(name, name)}={value!r:.60}"
        numbers = [leaf for leaf in _leaves(value) if isinstance(leaf, (int, float))]
        if len(numbers) > MAX_VALUES:
            raise OptionError(f"{wrong} has {len(numbers)} values; it may have {MAX_VALUES}")
        for number in numbers:
            # In this form NaN is rejected too.
            if not abs(number) <= MAX_NUMBER:
                raise OptionError(
                    f"{wrong} contains {number!r:.30}; numbers must be finite and at most "
                    f"{MAX_NUMBER}"
                )
        _check_range(name, value, wrong)
        _check_tokens(name, value, wrong, vocab)
    _check_stop_strings(config.stop_strings, settings)


def fit_to_context(
    config: GenerationConfig, model: PreTrainedModel, prompt_len: int, settings: ServeSettings
) -> None:
    """Limit the output length; at the limit it ends with `finish_reason` "length".

    Raises `OptionError` if the prompt is too long.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (context, settings.max_length) if limit is not None]
    longest = min(limits, default=MAX_LENGTH)
    if settings.max_prompt is not None and prompt_len > settings.max_prompt:
        raise OptionError(
            f"the prompt has {prompt_len} tokens; it may have {settings.max_prompt}; shorten it"
        )
    if prompt_len >= longest:
        raise OptionError(
            f"the prompt has {prompt_len} tokens; prompt and output may have {longest}; shorten it"
        )
    room = min(longest - prompt_len, settings.max_tokens or longest)
    if config.max_new_tokens is not None:
        config.max_new_tokens = min(config.max_new_tokens, room)
    else:
        config.max_length = min(config.max_length or longest, prompt_len + room)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids with both an embedding and a logit."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    embeddings = num_embeddings(model)
    return embeddings if weight is None else min(embeddings, weight.shape[0])


def _check_range(name: str, value: Any, wrong: str) -> None:
    if name not in RANGES:
        return
    low, high = RANGES[name]
    kinds = (int,) if isinstance(low, int) else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
        kind = "a whole number" if kinds == (int,) else "a number"
        raise OptionError(f"{wrong} must be {kind} between {low} and {high}")
    if name == "temperature" and 0 < value < MIN_TEMPERATURE:
        raise OptionError(f"{wrong} must be 0 or at least {MIN_TEMPERATURE}")


def _check_tokens(name: str, value: Any, wrong: str, vocab: int) -> None:
    if name == "sequence_bias":
        pairs = list(value.items() if isinstance(value, dict) else value)
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            raise OptionError(f"{wrong} must contain pairs of token ids and a number")
        if not all(isinstance(bias, (int, float)) for _, bias in pairs):
            raise OptionError(f"{wrong}: a bias must be a number")
        value = [ids for ids, _ in pairs]
    elif name not in TOKEN_SETTINGS:
        return
    for token in _leaves(value):
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab:
            raise OptionError(
                f"{wrong} contains {token!r:.30}; token ids of this model are 0 to {vocab - 1}"
            )


def _check_stop_strings(strings: Any, settings: ServeSettings) -> None:
    if strings is None:
        return
    stops = [strings] if isinstance(strings, str) else strings
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise OptionError(f"stop={strings!r:.60} must be a non-empty string or a list of them")
    if len(stops) > settings.max_stop:
        raise OptionError(f"stop has {len(stops)} strings; a request may have {settings.max_stop}")
    if (longest := max(map(len, stops), default=0)) > settings.max_stop_length:
        raise OptionError(
            f"stop has a string of {longest} characters; each may have {settings.max_stop_length}"
        )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(key)
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
