"""Checks for models that no strategy can decode exactly; they raise before any forward pass."""

from __future__ import annotations

import logging

import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_spec.backend.device.distributed_checks import check_sharding, tensor_parallel_size
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import cache_parameter, unknown_cache_parameter, version_message
from hf_spec.common.errors import UnsupportedError
from hf_spec.common.logging import log_once
from hf_spec.engine.forward.tree_attention import takes_packed
from hf_spec.engine.models.cross_attention import ENCODER_DECODERS, takes_positions
from hf_spec.engine.models.internal_positions import tables_of, uses_alibi
from hf_spec.engine.models.recurrent_layers import (
    PASTLESS_LAYERS,
    RECURRENT_LAYERS,
    mixers_of,
    num_attention_layers,
    num_recurrent_layers,
    stateful_modules,
)

logger = logging.getLogger(__name__)

# Layers whose cache can be rolled back: keys and values, the state of a mixer, or none.
SUPPORTED_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention"),
    *RECURRENT_LAYERS,
    *PASTLESS_LAYERS,
}

# Architectures whose attention needs more than keys, values and a mask of visible tokens -> why.
UNSUPPORTED = {
    "doge": "its mask weighs keys by their values, which a tree mask cannot express",
    "kosmos_2_5_text_model": "plain generate() counts its positions from the padding token on",
    "mllama_text_model": "its cross-attention layers read images, not keys of its tokens",
    "roformer": "all rows of a batch share one set of position angles",
    "hrm_text": "its layers run several times per token, each time with other keys and values",
    "moshi": "its tokens encode text and audio at once",
}

# Attention implementations that take a tree mask; None is the default of a model class.
MASKED_ATTENTION = (None, "eager", "sdpa")

# Methods of transformers' decoding loop that the engine does not call in its decoding steps.
UNCALLED = ("prepare_inputs_for_generation", "_sample")


def check_weights(model: object) -> None:
    """Raise `UnsupportedError` for a target or assistant without weights."""
    if isinstance(model, PreTrainedModel) and execution_device(model).type == "meta":
        raise UnsupportedError(
            f"{type(model).__name__} is on the device 'meta', without weights; load them with "
            "from_pretrained()"
        )


def check_model(model: object) -> None:
    """Raise `UnsupportedError` for a model whose cache cannot be rolled back token by token.

    Methods of the model's class that are not called are logged once per class.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers PreTrainedModel")
    name = type(model).__name__
    if model.config.is_encoder_decoder and model.config.model_type not in ENCODER_DECODERS:
        raise UnsupportedError(
            f"{name} is an encoder-decoder; hf_spec supports Whisper, which takes the positions of "
            "draft branches, and decoder-only models"
        )
    config = model.config.get_text_config()
    # Indexed layers select the keys of a token; calls are checked for lengths where they drop some.
    indexed = {"indexed_attention"} if hasattr(config, "index_topk") else set()
    odd = sorted(set(getattr(config, "layer_types", None) or []) - SUPPORTED_LAYERS - indexed)
    if odd or not _has_known_states(model):
        detail = f"layers of type {', '.join(odd)}" if odd else "an unknown recurrent state"
        raise UnsupportedError(
            f"{name} has {detail}, which cannot be rolled back after a rejected token; "
            "generate without spec_strategy"
        )
    if not model.can_generate():
        raise UnsupportedError(
            f"{name} has no language-model head and cannot generate; load a model that has: "
            "AutoModelForCausalLM"
        )
    _check_attention(model, name)
    check_sharding(model)
    if tensor_parallel_size(model) > 1 and mixers_of(model):
        raise UnsupportedError(
            f"{name} has recurrent layers, which are supported in one process only; load it "
            "without tp_plan"
        )
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedError(
            "prompt-learning adapters put virtual tokens before every input, which spec_strategy "
            "does not support; use LoRA or another adapter that changes weights"
        )
    attention = model.config._attn_implementation
    if not takes_packed(model) and attention not in MASKED_ATTENTION:
        raise UnsupportedError(
            f"attn_implementation={attention!r} takes no tree mask, and {name} has no attention "
            "interface; load it with attn_implementation='sdpa'"
        )
    if not takes_packed(model) and limits_attention(model):
        raise UnsupportedError(
            f"{name} has a sliding window or chunks but no attention interface, so the mask of a "
            "draft tree cannot be set"
        )
    _warn_of_overrides(type(model))


def check_attention_function(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError` for a target whose attention is not one of transformers.

    The engine replaces the attention of packed models by its own, which computes the same as each
    implementation in transformers. Draft models are not checked: they need not be exact.
    """
    name = model.config.get_text_config()._attn_implementation
    if takes_packed(model) and not _is_exact(name):
        other = "eager" if name == "sdpa" else "sdpa"
        raise UnsupportedError(
            f"attn_implementation={name!r} is a function outside transformers, which spec_strategy "
            f"would replace in {type(model).__name__}; call model.set_attn_implementation("
            f'"{other}"), or generate without spec_strategy'
        )


def _is_exact(name: str | None) -> bool:
    """Return True if an attention implementation computes plain softmax attention.

    This holds for every function in transformers, whatever name it is registered under, and for
    kernels of the Hub named "org/repo": transformers loads only flash attention that way.
    "org/repo:function" may be any function, as may a name that a user has registered again.
    """
    # Paged variants differ in their cache only, which is not used.
    name = (name or "eager").removeprefix("paged|")
    if "/" in name and ":" not in name:
        return True
    # Every modeling file has an eager attention of its own, which is not registered. `hf_spec` is
    # the name of our attention inside a forward pass.
    registered = ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    packages = {_package(function) for function in registered if function is not None}
    known = name == "eager" or registered[0] is not None
    return known and packages <= {"transformers", "hf_spec"}


def _warn_of_overrides(model_class: type[PreTrainedModel]) -> None:
    own = [name for name in UNCALLED if _package(getattr(model_class, name)) != "transformers"]
    if own:
        log_once(
            logger,
            logging.WARNING,
            f"spec_strategy does not call {'() and '.join(own)}() of {model_class.__module__}."
            f"{model_class.__qualname__} in its decoding steps; if the output of generate() "
            "depends on it, generate without spec_strategy",
        )


def _package(function: object) -> str:
    """Return the name of the package that a function is defined in."""
    return getattr(function, "__module__", "").partition(".")[0]


def _has_known_states(model: PreTrainedModel) -> bool:
    """Return True if every state in the model's cache belongs to a mixer, at most one per layer."""
    recurrent = num_recurrent_layers(model.config.get_text_config())
    mixers = mixers_of(model)
    if len(mixers) != recurrent or mixers != stateful_modules(model):
        return False
    unknown = getattr(model, "_is_stateful", False) and not recurrent
    return not unknown and len({mixer.layer_idx for mixer in mixers}) == recurrent


def _check_attention(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    reason = UNSUPPORTED.get(config.model_type)
    has_positions = takes_positions(model) or uses_alibi(model) or bool(tables_of(model))
    # Encoders that can act as decoders also have cross attention; GPT-NeoX has `is_decoder` unused.
    encoder = getattr(config, "is_decoder", True) is False
    if encoder and hasattr(config, "add_cross_attention"):
        reason = "config.is_decoder is False, so tokens also attend to later ones"
    elif cache_parameter(model.forward) is None:
        reason = "it caches no keys and values"
        if (unknown := unknown_cache_parameter(model.forward)) is not None:
            problem = f"its forward takes the cache as {unknown}=, which is unknown"
            reason = f"{problem}: {version_message()}"
    elif not has_positions and num_attention_layers(config):
        reason = "it takes no position_ids, so draft branches cannot be given their positions"
    elif "local" in (getattr(config, "attention_layers", None) or ()):
        reason = "the window of its local layers counts stored tokens, not positions"
    elif config.model_type == "git" and Version(transformers.__version__) < Version("5.23"):
        reason = "transformers before 5.23 widens its mask; install a newer one"
    if reason is not None:
        raise UnsupportedError(f"{name} cannot decode draft trees: {reason}")


def limits_attention(model: PreTrainedModel) -> bool:
    """Return True if layers of a model attend within a window or a chunk of the text."""
    config = model.config.get_text_config()
    limits = ("sliding_window", "attention_chunk_size")
    return any(getattr(config, name, None) for name in limits)


def takes_images(model: PreTrainedModel) -> bool:
    """Return True for a model that reads images beside text, False for the text model inside it."""
    config = model.config
    # Some versions of transformers list no modalities for Qwen3.5.
    has_images = "image" in model.input_modalities or hasattr(config, "vision_config")
    return has_images and config.get_text_config() is not config
