"""Refusals of models: what no strategy can decode exactly, said before the first forward pass."""

from __future__ import annotations

import inspect

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from hf_spec.devices.distributed_checks import check_sharding, tensor_parallel_size
from hf_spec.errors import UnsupportedError
from hf_spec.execution.alibi import uses_alibi
from hf_spec.execution.attention import takes_packed
from hf_spec.execution.mixers import (
    PASTLESS_LAYERS,
    RECURRENT_LAYERS,
    mixers_of,
    num_attention_layers,
    num_recurrent_layers,
    resumes,
    stateful_modules,
)
from hf_spec.execution.own_positions import tables_of
from hf_spec.execution.row_work import BATCHING

# Layers whose past can be taken back: keys and values, the state of a mixer, or nothing at all.
SERVED_LAYERS = {
    "full_attention",
    "sliding_attention",
    *RECURRENT_LAYERS,
    *PASTLESS_LAYERS,
}

# Architectures whose attention needs more than keys, values and a mask of visible tokens.
UNSERVED = {
    "doge": "its mask weighs keys by their values, which a draft tree cannot carry",
    "kosmos_2_5_text_model": "plain generate() has it count positions from its padding token on",
    "mllama_text_model": "its cross-attention layers read images, not keys of its tokens",
    "roformer": "all rows of a batch share the angles of their positions",
    "hrm_text": "its layers run several times per token, each time with other keys and values",
    "moshi": "its tokens stand for text and sound at once",
}


def check_model(model: object) -> None:
    """Refuse models whose state cannot be rolled back token by token (`UnsupportedError`)."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers PreTrainedModel")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder; hf_spec serves decoder-only models")
    config = model.config.get_text_config()
    # These choose what a token sees, and calls are checked for where they begin to leave some out.
    indexed = {"indexed_attention"} if hasattr(config, "index_topk") else set()
    odd = sorted(set(getattr(config, "layer_types", None) or []) - SERVED_LAYERS - indexed)
    if odd or not _has_known_states(model):
        detail = f"layers of type {', '.join(odd)}" if odd else "a recurrent state of its own kind"
        raise UnsupportedError(
            f"{name} has {detail}, which cannot take a rejected token back; "
            "generate without spec_strategy"
        )
    if not model.can_generate():
        raise UnsupportedError(f"{name} has no language-model head and cannot generate")
    _check_attention(model, name)
    check_sharding(model)
    if tensor_parallel_size(model) > 1 and mixers_of(model):
        raise UnsupportedError(
            f"{name} has recurrent layers, which are served in one process; load it without tp_plan"
        )
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedError(
            "prompt-learning adapters put virtual tokens before every input, which spec_strategy "
            "cannot carry; use LoRA or another adapter that changes weights"
        )
    if not takes_packed(model) and getattr(config, "sliding_window", None):
        raise UnsupportedError(
            f"{name} has a sliding window but no attention interface, so the window of a draft "
            "tree cannot be set"
        )


def _has_known_states(model: PreTrainedModel) -> bool:
    """Whether every state that the model keeps is that of a mixer, one in a layer."""
    recurrent = num_recurrent_layers(model.config.get_text_config())
    mixers = mixers_of(model)
    if len(mixers) != recurrent or mixers != stateful_modules(model):
        return False
    unknown = getattr(model, "_is_stateful", False) and not recurrent
    return not unknown and len({mixer.layer_idx for mixer in mixers}) == recurrent


def _check_attention(model: PreTrainedModel, name: str) -> None:
    """Refuse models that cannot be shown a tree: where its tokens stand, what they look back on."""
    config = model.config.get_text_config()
    arguments = inspect.signature(model.forward).parameters
    reason = UNSERVED.get(config.model_type)
    # Encoders that can be made decoders know cross attention; GPT-NeoX has the same unused field.
    encoder = getattr(config, "is_decoder", True) is False
    if encoder and hasattr(config, "add_cross_attention"):
        reason = "config.is_decoder is False, so that tokens also look ahead"
    elif not {"past_key_values", "cache_params"} & set(arguments):
        reason = "it keeps no keys and values"
    elif not _takes_positions(model) and num_attention_layers(config):
        reason = "it takes no position_ids, so the branches of a draft tree cannot be placed"
    elif "local" in (getattr(config, "attention_layers", None) or ()):
        reason = "the window of its local layers counts stored tokens, not positions"
    elif config.model_type == "git" and Version(transformers.__version__) < Version("5.23"):
        reason = "transformers before 5.23 widens its mask; install a newer one"
    if reason is not None:
        raise UnsupportedError(f"{name} cannot decode draft trees: {reason}")


def _takes_positions(model: PreTrainedModel) -> bool:
    given = "position_ids" in inspect.signature(model.forward).parameters
    return given or uses_alibi(model) or bool(tables_of(model))


def check_batching(model: PreTrainedModel, batching: str) -> None:
    """Refuse padding that the layout of the model's inputs does not allow to choose."""
    chosen = BATCHING[batching]
    if chosen.pads_kv and not chosen.pads_inputs and not takes_packed(model):
        raise UnsupportedError(
            f"batching={batching!r}: {type(model).__name__} takes no attention function, so that "
            "its inputs are always padded; use 'padded', or 'unpadded' for unpadded storage"
        )


def check_evaluation(model: PreTrainedModel) -> None:
    """Refuse a target in training mode wherever that changes its forward pass."""
    training = [module for module in model.modules() if module.training]
    if not training:
        return
    random = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in training)
    recomputes = any(getattr(m, "gradient_checkpointing", False) for m in training)
    config = model.config.get_text_config().to_dict()
    drops = sorted(k for k, v in config.items() if "drop" in k and isinstance(v, float) and v > 0)
    if random or recomputes or drops:
        raise UnsupportedError(
            f"{type(model).__name__} is in training mode with dropout or gradient checkpointing"
            f"{' (' + ', '.join(drops) + ')' if drops else ''}; call model.eval() before generate()"
        )


def check_resumable(model: PreTrainedModel) -> None:
    """Refuse a reused cache where transformers itself goes wrong on several tokens after it."""
    if not resumes(model):
        raise UnsupportedError(
            f"past_key_values: the scan of {type(model).__name__} in transformers forgets its "
            "state wherever it is given several tokens at once; leave them out"
        )


def check_peft_hooks(model: PreTrainedModel, num_rows: int) -> None:
    """Refuse what PEFT hangs on its layers for one call, where drafts are not what it expects.

    With `adapter_names=`, and for aLoRA adapters, the layers look for one row per sequence, and
    count places from the end of a forward. The hooks are taken off before the error, which PEFT
    leaves to a call that ends well; else they would disturb all calls to come.
    """
    hooks = [
        (module, key, getattr(hook, "keywords", {}))
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
    ]
    names = next((k["adapter_names"] for *_, k in hooks if "adapter_names" in k), None)
    offsets = next((k["alora_offsets"] for *_, k in hooks if "alora_offsets" in k), None)
    reason = None
    if any(offset is not None for offset in offsets or ()):
        reason = (
            "aLoRA adapters begin at a place counted from the end of a forward, where there are "
            "drafts; generate without spec_strategy"
        )
    elif (names or offsets) and num_rows > 1 and takes_packed(model):
        reason = (
            f"adapter_names={names!r}: the rows of a step are not padded to rows of equal length, "
            "where PEFT looks for the adapter of each; call generate() once per adapter, after "
            "model.set_adapter(name), or with one row at a time"
        )
    if reason is None:
        return
    for module, key, keywords in hooks:
        if "adapter_names" in keywords or "alora_offsets" in keywords:
            module._forward_pre_hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    raise UnsupportedError(reason)


def takes_images(model: PreTrainedModel) -> bool:
    """Whether a model reads images beside text; the text model inside says that it does, too."""
    config = model.config
    # Some versions of transformers do not say so of Qwen3.5.
    shown = "image" in model.input_modalities or hasattr(config, "vision_config")
    return shown and config.get_text_config() is not config
