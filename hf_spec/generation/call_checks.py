"""Checks of a call's settings and inputs, before the first forward pass.

They raise `UnsupportedError`, or `OptionError` for a value that is wrong in any call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, MaxLengthCriteria, PreTrainedModel

from hf_spec.common.compat import (
    CACHE_NAME,
    CACHE_NAMES,
    find_cache,
    stored_tokens,
    version_message,
)
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.engine.decode.streaming import BatchStreamer
from hf_spec.engine.forward.kv_pool import check_reusable
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.engine.models.internal_positions import tables_of
from hf_spec.engine.models.latent_kv import caches_latents
from hf_spec.engine.models.support_checks import limits_attention, takes_images
from hf_spec.generation.own_prefill import IMAGE_INPUTS, is_shifted
from hf_spec.generation.target_checks import (
    check_index,
    check_peft_hooks,
    check_resumable,
    check_rope,
    is_past_rope,
)

# Settings that select another decoding method, and its name for the message.
OTHER_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "prompt_lookup_num_tokens": "transformers' prompt lookup (use spec_strategy='lookup')",
    "assistant_early_exit": "early-exit speculation (use hf_spec.truncated_draft)",
    "use_mtp": "transformers' multi-token prediction",
    "speculation_type": "another speculation",
    "assistant_ensemble_weight": "a mixture with the assistant, which changes the output",
    "token_healing": "token healing",
    "is_assistant": "the draft side of transformers' assisted generation",
    "prefill_chunk_size": "chunked prefill (long prompts are always run in chunks)",
}

# Other settings: the supported values, and the reason and remedy for all others.
SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), ": spec_strategy decodes greedily or by sampling; set num_beams=1"),
    "guidance_scale": (
        (None, 1),
        " runs a second forward pass for every token of the output, which a draft tree cannot "
        "share; unset it",
    ),
    "output_attentions": (
        (None, False),
        " is not available with spec_strategy, whose forward passes contain drafts; run the "
        "finished sequence through model() instead",
    ),
    "use_cache": ((None, True), ": speculative decoding needs a KV cache; leave it out"),
    # Caches that generate() creates by default. "hybrid", from old files, is ignored. "static" asks
    # for memory at fixed addresses, which the engine's pool has anyway.
    "cache_implementation": (
        (None, "dynamic", "hybrid", "static"),
        " cannot be combined with spec_strategy, which has its own KV cache; leave it out",
    ),
}
SUPPORTED_VALUES["output_hidden_states"] = SUPPORTED_VALUES["output_attentions"]

# Model inputs that the engine reads; it would drop any other.
MODEL_INPUTS = {
    "attention_mask",
    "position_ids",
    *CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "return_dict",
}

# Parts of the names of model inputs that are neither text nor images.
OTHER_MODALITIES = ("video", "audio", "input_features", "input_values")


class Settings:
    """Settings by name as `generate()` resolves them: of the call, of its config, of the model."""

    def __init__(self, model: PreTrainedModel, arguments: Mapping[str, Any]):
        config = arguments.get("generation_config")
        if config is not None and not isinstance(config, GenerationConfig):
            raise OptionError(
                f"generation_config of type {type(config).__name__}: pass a GenerationConfig, or "
                "the settings as keyword arguments"
            )
        self._arguments = arguments
        self._configs = [config, getattr(model, "generation_config", None)]

    def __getitem__(self, name: str) -> Any:
        if name in self._arguments:
            return self._arguments[name]
        values = (getattr(config, name, None) for config in self._configs)
        return next((value for value in values if value is not None), None)


def check_settings(settings: Settings) -> None:
    """Check that settings have supported values and select no other decoding method."""
    for name, (values, reason) in SUPPORTED_VALUES.items():
        if settings[name] not in values:
            raise UnsupportedError(f"{name}={settings[name]!r}{reason}")
    for name, method in OTHER_METHODS.items():
        value = settings[name]
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}={value!r} selects {method}; unset it")
    _check_lengths(settings)


def _check_lengths(settings: Settings) -> None:
    """Check that maximum lengths are integers of any type, which `StopRules` expects."""
    used = "max_length" if settings["max_new_tokens"] is None else "max_new_tokens"
    lengths = {used: settings[used]}
    for criterion in settings["stopping_criteria"] or ():
        if type(criterion) is MaxLengthCriteria:
            lengths["MaxLengthCriteria.max_length"] = criterion.max_length
    for name, value in lengths.items():
        try:
            _ = value is None or operator.index(value)
        except TypeError as error:
            raise UnsupportedError(
                f"{name}={value!r}: maximum lengths must be whole numbers"
            ) from error


def check_callables(arguments: Mapping[str, Any]) -> None:
    """Check arguments that `generate()` would only fail to call after the first forward pass."""
    for name in ("logits_processor", "stopping_criteria"):
        value = arguments.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise OptionError(f"{name} of type {type(value).__name__}: pass a list of them")
    for criterion in arguments.get("stopping_criteria") or ():
        if not callable(criterion):
            raise OptionError(
                f"stopping_criteria contains {criterion!r}, which cannot be called with "
                "(input_ids, scores); pass instances of StoppingCriteria"
            )
    allowed = arguments.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise OptionError(
            f"prefix_allowed_tokens_fn={allowed!r} cannot be called; pass a function of the row's "
            "number and its token ids"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check types and shapes of arguments before `generate()` reads them."""
    check_modalities(name for name, value in arguments.items() if value is not None)
    shape = None
    for name in ("inputs", "input_ids"):
        ids = arguments.get(name)
        if ids is None:
            continue
        if not isinstance(ids, Tensor):
            raise UnsupportedError(
                f"{name} of type {type(ids).__name__}: spec_strategy needs a tensor of token ids, "
                "as tokenizer(text, return_tensors='pt').input_ids"
            )
        if ids.ndim != 2 or 0 in ids.shape or ids.dtype not in (torch.long, torch.int):
            raise UnsupportedError(
                f"{name} of shape {tuple(ids.shape)} and {ids.dtype}: spec_strategy needs token "
                "ids of shape (batch, length), int64, at least one token in every row"
            )
        shape = ids.shape
    for name in ("attention_mask", "position_ids"):
        value = arguments.get(name)
        if value is None:
            continue
        fits = isinstance(value, Tensor) and value.ndim == 2 and not value.dtype.is_complex
        if shape is not None and fits:
            broadcasts = name == "position_ids" and value.shape[0] == 1
            fits = value.shape[1] == shape[1] and (broadcasts or value.shape[0] == shape[0])
        if not fits:
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            expected = tuple(shape) if shape is not None else "(none)"
            raise UnsupportedError(
                f"{name} ({actual}) does not match the input_ids {expected}; pass the whole "
                "sequence, also with a reused cache"
            )
    cache = find_cache(arguments)
    if cache is not None:
        check_reusable(cache)


def num_sequences(arguments: Mapping[str, Any], settings: Settings) -> int:
    """Return the number of sequences that a call generates; inputs without tensors count as one."""
    inputs = (arguments.get(name) for name in ("inputs", "input_ids", "input_features"))
    prompts = next((len(value) for value in inputs if isinstance(value, Tensor)), 1)
    return prompts * (settings["num_return_sequences"] or 1)


def check_streamer(streamer: object, num_rows: int = 1) -> None:
    """Check that a streamer has the methods of one, and for several rows that it separates them."""
    if streamer is None:
        return
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise OptionError(
            f"streamer={streamer!r} has no put() and end(); pass a transformers streamer such as "
            "TextStreamer(tokenizer)"
        )
    if num_rows > 1:
        check_batch_streamer(streamer)


def check_batch_streamer(streamer: object) -> None:
    """Check that a streamer can follow several sequences."""
    if streamer is not None and not isinstance(streamer, BatchStreamer):
        raise UnsupportedError(
            f"a streamer of type {type(streamer).__name__} follows one sequence, and several "
            "advance at different speeds; pass hf_spec.BatchStreamer(on_tokens) or "
            "hf_spec.BatchTextStreamer(tokenizer, on_text)"
        )


def check_padding(pad_token_id: object, pads: bool) -> None:
    """Check that a call that pads rows has a padding token; plain `generate()` fails without."""
    if pads and pad_token_id is None:
        raise OptionError(
            "pad_token_id=None: a stopping criterion with eos_token_id makes generate() pad the "
            "rows that have ended; set pad_token_id="
        )


def _check_token_types(model: PreTrainedModel, token_type_ids: Tensor | None) -> None:
    """Raise an error for token types that change the output of the model.

    Models like BERT have a table of types and use type 0 by default; CTRL gets none from
    `generate()`. Models like GPT-2 add the embedding of the *token* with that id, even for 0.
    """
    if token_type_ids is None or model.config.model_type == "ctrl":
        return
    has_type_table = any(
        name.endswith("token_type_embeddings") for name, _ in model.named_modules()
    )
    if has_type_table and not bool(token_type_ids.any()):
        return
    types = sorted(set(token_type_ids.flatten().tolist()))
    raise UnsupportedError(
        f"token_type_ids (values {', '.join(map(str, types[:4]))}): {type(model).__name__} "
        "uses them, and spec_strategy does not support that; leave them out "
        "(tokenizer(..., return_token_type_ids=False)), or generate without spec_strategy"
    )


def check_inputs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    model_kwargs: Mapping[str, Any],
    max_length: int | None,
) -> None:
    """Check the prompts of a call against the vocabulary, the target and the unpadded layout.

    Args:
        model: the target.
        input_ids: (B, L) integers, expanded for `num_return_sequences`.
        attention_mask: (B, L).
        model_kwargs: what `generate()` prepared for the model.
        max_length: maximum length of the output in tokens, None if unlimited.
    """
    _check_names(model, model_kwargs)
    low, high = int(input_ids.min()), int(input_ids.max())
    vocab = num_embeddings(model)
    if low < 0 or high >= vocab:
        raise UnsupportedError(
            f"input_ids have values from {low} to {high}, but the model's vocabulary is 0 to "
            f"{vocab - 1}; use the tokenizer of this model"
        )
    positions = model_kwargs.get("position_ids")
    for name, value in (("attention_mask", attention_mask), ("position_ids", positions)):
        if value is not None and value.shape[-1] != input_ids.shape[1]:
            raise UnsupportedError(
                f"{name} of {value.shape[-1]} columns for a prompt of {input_ids.shape[1]} tokens; "
                "leave it out, or pass the prompt as input_ids"
            )
    check_peft_hooks(model, input_ids.shape[0])
    _check_mask(model, attention_mask)
    if positions is not None and positions.ndim == 2 and is_shifted(positions, attention_mask):
        raise UnsupportedError(
            "position_ids other than 0, 1, 2, ... over the attended tokens cannot be used with "
            "spec_strategy; leave them out"
        )
    _check_cache(model, find_cache(model_kwargs), input_ids)
    if not is_past_rope(model, attention_mask):
        check_rope(model, max_length)
    check_index(model, max_length)


def _check_names(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    supported = {*MODEL_INPUTS, "token_type_ids"}
    if takes_images(model):
        supported |= IMAGE_INPUTS
        check_modalities(model_kwargs.get("mm_encoder_outputs") or {})
    else:
        _check_token_types(model, model_kwargs.get("token_type_ids"))
    # Image-text classes get an empty dictionary as the output of their vision towers.
    empty = [name for name, value in model_kwargs.items() if value is None or value == {}]
    if extra := sorted(model_kwargs.keys() - supported - {*empty}):
        caches = [name for name in extra if isinstance(model_kwargs[name], Cache)]
        reason = f"; {version_message()}" if caches else "; text given as input_ids can"
        raise UnsupportedError(
            f"model inputs {', '.join(extra)} cannot be used with spec_strategy{reason}"
        )


def check_modalities(names: Iterable[str]) -> None:
    """Check by name that no input is video or audio."""
    unsupported = [name for name in names if any(part in name for part in OTHER_MODALITIES)]
    if unsupported:
        raise UnsupportedError(
            f"{', '.join(sorted(unsupported))}: spec_strategy supports prompts of text and images, "
            "not of video or audio; generate without it"
        )


def _check_mask(model: PreTrainedModel, mask: Tensor) -> None:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UnsupportedError(
            "attention_mask has values other than 0 and 1, which spec_strategy does not support; "
            "pass 1 for tokens and 0 for padding"
        )
    if rows := (mask[:, -1] == 0).nonzero().flatten().tolist():
        raise UnsupportedError(
            f"rows {rows} end in padding (attention_mask 0 in the last column) or are all padding; "
            "pad on the left: tokenizer.padding_side = 'left'"
        )
    if model.config.model_type == "git" and not bool(mask.all()):
        raise UnsupportedError(
            f"{type(model).__name__} counts padding in its positions, so its answers would depend "
            "on the longest row; generate one row at a time"
        )
    holes = (mask.long().diff(dim=-1) < 0).any(dim=-1)
    limited = limits_attention(model)
    if bool(holes.any()) and (limited or tables_of(model)):
        counting = "a sliding window or a chunk" if limited else "the table of positions"
        raise UnsupportedError(
            f"rows {holes.nonzero().flatten().tolist()} have padding between their tokens, which "
            f"{counting} counts and spec_strategy does not; pad on the left only"
        )


def _check_cache(model: PreTrainedModel, cache: Any, input_ids: Tensor) -> None:
    if getattr(cache, "_is_user_defined", False) and caches_latents(model):
        raise UnsupportedError(
            f"{CACHE_NAME}: {type(model).__name__} caches latents, but draft trees store keys and "
            "values of all heads; leave the cache out"
        )
    stored = stored_tokens(cache)
    if not stored:
        return
    num_rows, length = input_ids.shape
    if stored >= length:
        raise UnsupportedError(
            f"{CACHE_NAME} holds {stored} tokens and input_ids {length}; input_ids must be the "
            "whole sequence, with at least one token that is not cached"
        )
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    check_resumable(model)
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    rows = next(len(tensor) for tensor in keys if tensor is not None)
    # Layers that share keys and values are empty in newer caches and missing in older ones.
    sharing = getattr(config, "num_kv_shared_layers", None) or 0
    if rows != num_rows or len(cache.layers) not in {layers, layers - sharing}:
        raise UnsupportedError(
            f"{CACHE_NAME} has {rows} rows of {len(cache.layers)} layers, but the call has "
            f"{num_rows} rows and the model {layers} layers; pass the cache of the same batch"
        )
