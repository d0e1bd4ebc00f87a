"""Refusals of calls: settings and inputs that no strategy serves, said before the first forward.

Every one is an `UnsupportedError`, or an `OptionError` for a value that is wrong in any call, and
names the argument, its value and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

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
from hf_spec.engine.models.support_checks import (
    limits_attention,
    takes_images,
)
from hf_spec.generation.length_checks import check_index, check_rope, is_past_rope
from hf_spec.generation.own_prefill import IMAGE_INPUTS, is_moved
from hf_spec.generation.target_checks import check_peft_hooks, check_resumable

# Settings that choose another decoding method, and what to say about each.
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
    "prefill_chunk_size": "chunked prefill (long prompts are run in stretches anyway)",
}

# Other settings: the values that are served, and what to say of every other one.
SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": (
        (None, 1),
        ": spec_strategy decodes greedily or by sampling; set num_beams=1",
    ),
    "guidance_scale": (
        (None, 1),
        " runs a second forward of the model for every token of the output, which a draft tree "
        "cannot share; unset it",
    ),
    "output_attentions": (
        (None, False),
        " is not available with spec_strategy: the forward passes hold drafts; run the finished "
        "sequence through model() instead",
    ),
    "use_cache": (
        (None, True),
        ": speculative decoding keeps keys and values; leave it out",
    ),
    # Names of the cache that generate() makes by itself; "hybrid" stands in old files, is ignored.
    # "static" is storage that does not move from step to step, which the engine's own is anyway.
    "cache_implementation": (
        (None, "dynamic", "hybrid", "static"),
        " cannot be combined with spec_strategy, which keeps its own keys and values; leave it out",
    ),
}
SERVED["output_hidden_states"] = SERVED["output_attentions"]

# Keyword arguments of the decoding step that are understood; anything else would be dropped.
UNDERSTOOD = {
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
    """Generation settings of a call, by name, as `generate()` resolves them.

    What the call's arguments say goes first, their `generation_config` comes second, the model's
    last.
    """

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
    """Refuse generation settings that another decoding method owns, or that are not served."""
    for name, (values, reason) in SERVED.items():
        if settings[name] not in values:
            raise UnsupportedError(f"{name}={settings[name]!r}{reason}")
    for name, method in OTHER_METHODS.items():
        value = settings[name]
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}={value!r} asks for {method}; unset it")


def check_called(arguments: Mapping[str, Any]) -> None:
    """Refuse what `generate()` would call in vain, after the first forward."""
    for name in ("logits_processor", "stopping_criteria"):
        given = arguments.get(name)
        if given is not None and not isinstance(given, (list, tuple)):
            raise OptionError(f"{name} of type {type(given).__name__}: pass a list of them")
    for criterion in arguments.get("stopping_criteria") or ():
        if not callable(criterion):
            raise OptionError(
                f"stopping_criteria holds {criterion!r}, which cannot be called with "
                "(input_ids, scores); pass instances of StoppingCriteria"
            )
    allowed = arguments.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise OptionError(
            f"prefix_allowed_tokens_fn={allowed!r} cannot be called; pass a function of the row's "
            "number and its token ids"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of the wrong type or shape, before `generate()` works on them."""
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
        given = arguments.get(name)
        if given is None:
            continue
        fits = isinstance(given, Tensor) and given.ndim == 2 and not given.dtype.is_complex
        if shape is not None and fits:
            one_for_all = name == "position_ids" and given.shape[0] == 1
            fits = given.shape[1] == shape[1] and (one_for_all or given.shape[0] == shape[0])
        if not fits:
            what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise UnsupportedError(
                f"{name} ({what}) does not match the input_ids "
                f"{tuple(shape) if shape is not None else '(none)'}; pass the whole sequence, also "
                "with a reused cache"
            )
    cache = find_cache(arguments)
    if cache is not None:
        check_reusable(cache)


def check_streamer(streamer: object, num_rows: int = 1) -> None:
    """Refuse a streamer that is none, or one that cannot tell several rows apart."""
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
    """Refuse a streamer that follows one sequence, where there are several."""
    if streamer is not None and not isinstance(streamer, BatchStreamer):
        raise UnsupportedError(
            f"a streamer of type {type(streamer).__name__} follows one sequence, and several "
            "advance at different speeds; pass hf_spec.BatchStreamer(on_tokens) or "
            "hf_spec.BatchTextStreamer(tokenizer, on_text)"
        )


def check_padding(pad_token_id: object, pads: bool) -> None:
    """Refuse a call that pads rows and has no token for it, which plain `generate()` fails on."""
    if pads and pad_token_id is None:
        raise OptionError(
            "pad_token_id=None: a stopping criterion with eos_token_id makes generate() pad the "
            "rows that have ended; set pad_token_id="
        )


def _check_token_types(model: PreTrainedModel, token_type_ids: Tensor | None) -> None:
    """Refuse token types that are more to the model than leaving them out.

    BERT and its relatives have a table of types, and take type 0 where none is given; CTRL gets
    none from `generate()`. GPT-2 and its relatives add the embedding of the *token* of that number,
    so that to them even 0 says something.
    """
    if token_type_ids is None or model.config.model_type == "ctrl":
        return
    own_table = any(name.endswith("token_type_embeddings") for name, _ in model.named_modules())
    if own_table and not bool(token_type_ids.any()):
        return
    types = sorted(set(token_type_ids.flatten().tolist()))
    raise UnsupportedError(
        f"token_type_ids (values {', '.join(map(str, types[:4]))}): {type(model).__name__} "
        "computes with them, and spec_strategy cannot hand them on; leave them out "
        "(tokenizer(..., return_token_type_ids=False)), or generate without spec_strategy"
    )


def check_inputs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    model_kwargs: Mapping[str, Any],
    max_length: int | None,
) -> None:
    """Refuse prompts that the unpadded layout cannot hold.

    Args:
        model: the target.
        input_ids: (B, L) integers, expanded for `num_return_sequences`.
        attention_mask: (B, L).
        model_kwargs: what `generate()` prepared for the model.
        max_length: longest sequence that can come out, in tokens.
    """
    _check_names(model, model_kwargs)
    low, high = int(input_ids.min()), int(input_ids.max())
    vocab = num_embeddings(model)
    if low < 0 or high >= vocab:
        raise UnsupportedError(
            f"input_ids hold values from {low} to {high}; the model's vocabulary is 0 to "
            f"{vocab - 1}, so check that the tokenizer belongs to the model"
        )
    positions = model_kwargs.get("position_ids")
    for name, given in (("attention_mask", attention_mask), ("position_ids", positions)):
        if given is not None and given.shape[-1] != input_ids.shape[1]:
            raise UnsupportedError(
                f"{name} of {given.shape[-1]} columns for a prompt of {input_ids.shape[1]} tokens; "
                "leave it out, or give the prompt as input_ids"
            )
    check_peft_hooks(model, input_ids.shape[0])
    _check_mask(model, attention_mask)
    if positions is not None and positions.ndim == 2 and is_moved(positions, attention_mask):
        raise UnsupportedError(
            "position_ids other than 0, 1, 2, ... over the attended tokens cannot be used with "
            "spec_strategy; leave them out"
        )
    if not isinstance(max_length, (int, type(None))):
        raise UnsupportedError(
            f"a length of {max_length} tokens: max_new_tokens and max_length must be whole numbers"
        )
    _check_cache(model, find_cache(model_kwargs), input_ids)
    if not is_past_rope(model, attention_mask):
        check_rope(model, max_length)
    check_index(model, max_length)


def _check_names(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that no forward of the engine could hand on."""
    known = {*UNDERSTOOD, "token_type_ids"}
    if takes_images(model):
        known |= IMAGE_INPUTS
        check_modalities(model_kwargs.get("mm_encoder_outputs") or {})
    else:
        _check_token_types(model, model_kwargs.get("token_type_ids"))
    # Image-text classes get an empty dictionary of what their towers saw.
    empty = [name for name, value in model_kwargs.items() if value is None or value == {}]
    if extra := sorted(model_kwargs.keys() - known - {*empty}):
        caches = [name for name in extra if isinstance(model_kwargs[name], Cache)]
        reason = f"; {version_message()}" if caches else "; text given as input_ids can"
        raise UnsupportedError(
            f"model inputs {', '.join(extra)} cannot be used with spec_strategy{reason}"
        )


def check_modalities(names: Iterable[str]) -> None:
    """Refuse inputs, by name, of prompts that are neither text nor images."""
    if odd := sorted(name for name in names if any(part in name for part in OTHER_MODALITIES)):
        raise UnsupportedError(
            f"{', '.join(odd)}: prompts with video or sound are not served with spec_strategy, "
            "text and images are; generate without it"
        )


def _check_mask(model: PreTrainedModel, mask: Tensor) -> None:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UnsupportedError(
            "attention_mask holds values other than 0 and 1, which cannot be used with "
            "spec_strategy; pass 1 for tokens and 0 for padding"
        )
    if bad := (mask[:, -1] == 0).nonzero().flatten().tolist():
        raise UnsupportedError(
            f"rows {bad} end in padding (attention_mask 0 in the last column) or hold nothing else;"
            " pad on the left: tokenizer.padding_side = 'left'"
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
            f"rows {holes.nonzero().flatten().tolist()} have padding between their tokens, where "
            f"{counting} counts it and spec_strategy does not; pad on the left only"
        )


def _holds_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _check_cache(model: PreTrainedModel, cache: Any, input_ids: Tensor) -> None:
    if getattr(cache, "_is_user_defined", False) and caches_latents(model):
        raise UnsupportedError(
            f"{CACHE_NAME}: {type(model).__name__} caches latents, where draft trees store keys "
            "and values of all heads; leave them out"
        )
    stored = stored_tokens(cache)
    if not stored:
        return
    num_rows, length = input_ids.shape
    if stored >= length:
        raise UnsupportedError(
            f"{CACHE_NAME} holds {stored} tokens and input_ids {length}; "
            "input_ids must hold the whole sequence, with at least one token that is not cached"
        )
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    check_resumable(model)
    rows = next(layer.keys.shape[0] for layer in cache.layers if _holds_keys(layer))
    # Layers that share keys and values stand in newer caches, empty, and not in older ones.
    sharing = getattr(config, "num_kv_shared_layers", None) or 0
    if rows != num_rows or len(cache.layers) not in {layers, layers - sharing}:
        raise UnsupportedError(
            f"{CACHE_NAME} holds {rows} rows of {len(cache.layers)} layers, where the call has "
            f"{num_rows} rows and the model {layers} layers; pass the cache of the same batch"
        )
