"""Checks of a request before anything runs, with the limits of the server.

Endpoints write the fields of a body into a generation config, and a request may bring one of its
own. So most limits and ranges are checked there, once for all endpoints.
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

# Longest prompt with its answer where neither the model nor the settings have a limit.
MAX_LENGTH = 32768
# Most values in one setting of a generation config, such as the ids of `bad_words_ids`. Some
# processors take a time in proportion, in every step of the whole batch.
MAX_VALUES = 4096
MAX_NUMBER = 2**31 - 1
# Scores are divided by it in float32; 0 means greedy decoding.
MIN_TEMPERATURE = 1e-3

# Settings that a field of another name sets.
FIELDS = {"sequence_bias": "logit_bias (sequence_bias)"}
# Settings that hold token ids, one or more.
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
# Bounds that transformers leaves to the processor or does not have. It checks others itself.
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
    # Each of these multiplies the work and the memory of a request.
    "num_return_sequences": (1, 1),
    "num_beams": (1, 1),
    "num_beam_groups": (1, 1),
}


def check_body(body: Mapping[str, Any], settings: ServeSettings) -> None:
    """Check the fields of a body against the settings of the server.

    Raises:
        OptionError: names the field, its value and what is allowed.
    """
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if settings.max_tokens is not None and (body.get(name) or 0) > settings.max_tokens:
            raise OptionError(
                f"{name}={body[name]}: an answer may have {settings.max_tokens} tokens"
            )
    _check_template(body, settings)
    _check_config_text(body.get("generation_config"))


def _check_template(body: Mapping[str, Any], settings: ServeSettings) -> None:
    """Reject a client's chat template, and variables that are arguments of the call instead."""
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name, value in (body.get("chat_template_kwargs") or {}).items():
        if name == "chat_template":
            if not settings.client_templates:
                raise OptionError(
                    f"chat_template_kwargs holds chat_template={value!r:.60}: this server renders "
                    "the template of its model; start it with --client-templates to allow others"
                )
        elif name in own:
            raise OptionError(
                f"chat_template_kwargs holds {name}={value!r:.60}: this is an argument of the call "
                "and not a variable of the template; leave it out"
            )


def _check_config_text(text: str | None) -> None:
    """Check the names in the JSON of a request's own generation config."""
    if text is None:
        return
    given = json.loads(text)
    if not isinstance(given, dict):
        raise OptionError(f"generation_config={text!r:.60} must be the JSON of an object")
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    if unknown := sorted(given.keys() - known - STORED.keys()):
        raise OptionError(f"generation_config holds {unknown[0]!r:.60}, which is not a setting")


def check_config(config: GenerationConfig, model: PreTrainedModel, settings: ServeSettings) -> None:
    """Check every setting that differs from the model's own generation config.

    Raises:
        OptionError: names the setting, its value and what is allowed.
    """
    vocab = vocabulary_size(model)
    for name, value in vars(config).items():
        own = getattr(model.generation_config, name, None)
        if name.startswith("_") or value is None or value == own:
            continue
        wrong = f"{FIELDS.get(name, name)}={value!r:.60}"
        numbers = list(_numbers(value))
        if len(numbers) > MAX_VALUES:
            raise OptionError(f"{wrong} holds {len(numbers)} values; it may have {MAX_VALUES}")
        for number in numbers:
            # Written so that NaN is wrong, too.
            if not abs(number) <= MAX_NUMBER:
                raise OptionError(
                    f"{wrong} holds {number!r:.30}; numbers must be finite and at most {MAX_NUMBER}"
                )
        _check_range(name, value, wrong)
        _check_tokens(name, value, wrong, vocab)
    _check_stop_strings(config.stop_strings, settings)


def fit_to_context(
    config: GenerationConfig, model: PreTrainedModel, prompt_len: int, settings: ServeSettings
) -> None:
    """Shorten the answer to what the limits allow; it then ends with `finish_reason` "length".

    Raises:
        OptionError: if the prompt is too long.
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
            f"the prompt has {prompt_len} tokens, and with its answer it may have {longest}; "
            "shorten it"
        )
    room = min(longest - prompt_len, settings.max_tokens or longest)
    if config.max_new_tokens is not None:
        config.max_new_tokens = min(config.max_new_tokens, room)
    else:
        config.max_length = min(config.max_length or longest, prompt_len + room)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that have both an embedding and a score."""
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    sizes = [num_embeddings(model), *([] if weight is None else [weight.shape[0]])]
    return min(sizes)


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
            raise OptionError(f"{wrong} must hold pairs of token ids and a number")
        if not all(isinstance(bias, (int, float)) for _, bias in pairs):
            raise OptionError(f"{wrong}: a bias must be a number")
        value = [ids for ids, _ in pairs]
    elif name not in TOKEN_SETTINGS:
        return
    for token in _leaves(value):
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab:
            raise OptionError(
                f"{wrong} holds {token!r:.30}; token ids of this model are 0 to {vocab - 1}"
            )


def _check_stop_strings(strings: Any, settings: ServeSettings) -> None:
    if strings is None:
        return
    found = [strings] if isinstance(strings, str) else strings
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise OptionError(f"stop={strings!r:.60} must be a text or a list of texts, none empty")
    if len(found) > settings.max_stop:
        raise OptionError(f"stop holds {len(found)} texts; a request may have {settings.max_stop}")
    if (longest := max(map(len, found), default=0)) > settings.max_stop_length:
        raise OptionError(
            f"stop holds a text of {longest} characters; each may have {settings.max_stop_length}"
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


def _numbers(value: Any) -> Iterator[float]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, (int, float)))
