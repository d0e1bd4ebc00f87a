"""EAGLE-3 files for other engines: vLLM's speculators layout and SGLang's.

vLLM stores the layer's config in `transformer_layer_config` beside the verifier, and counts aux
layers as indices into `hidden_states`. SGLang reads SafeAILab's layout as SpecForge writes it: one
flat Llama config, the first layer named `midlayer`, aux layers in `eagle_config`. Both use the same
weights. An embedding equal to the target's is left out, since both engines share the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_spec.adapters.published import speculators_entries
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.methods.eagle.spec import EagleSpec
from hf_spec.methods.published_weights import draft_vocab_ids

logger = logging.getLogger(__name__)

# Config and tensors of a head.
Layout = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Verifier:
    """The target of a head: Hub id or folder, class names, and config of its text model."""

    name: str
    architectures: tuple[str, ...]
    text: Any


def for_vllm(
    spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier, steps: int
) -> Layout:
    """Return config and tensors of a head for vLLM, which drafts `steps` tokens per round.

    `tensors` are renamed by `canonical_names`. Networks that vLLM does not support, and a "d2t"
    that does not fit the target, raise `AssistantError`.
    """
    _check_supported(spec, tensors, "vLLM", {})
    exported = _exported_tensors(spec, tensors, verifier)
    kind = "eagle3" if spec.mask_token is None else "peagle"
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        **speculators_entries(kind, verifier.name, verifier.architectures, steps),
        "draft_vocab_size": _draft_vocab_size(exported, verifier),
        "eagle_aux_hidden_state_layer_ids": _indices(spec, verifier),
        # Always written: without it vLLM assumes true and speculators false.
        "norm_before_residual": spec.norm_before_residual,
        **_norm_switches(spec, exported),
        "target_hidden_size": verifier.text.hidden_size,
        "transformer_layer_config": _layer(spec, exported, verifier),
    }
    if spec.mask_token is not None:
        config["mask_token_id"] = spec.mask_token
    return config, exported


def for_sglang(
    spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier, steps: int
) -> Layout:
    """Return config and tensors of a head for SGLang, whose command line sets the draft length."""
    indices = _indices(spec, verifier)
    default = indices == list(default_aux_layers(verifier.text.num_hidden_layers))
    obstacles = {
        "drafts in one pass (P-EAGLE)": spec.mask_token is not None,
        "several layers": spec.layer["num_hidden_layers"] > 1,
        "the normed feature as a residual (norm_before_residual)": spec.norm_before_residual,
        "norms of queries and keys": "layers.0.self_attn.q_norm.weight" in tensors,
        "biases": any(name.endswith(".bias") for name in tensors),
        "an embedding of another width than the target's": (
            spec.hidden_size != verifier.text.hidden_size
        ),
        # SGLang counts layer outputs from 0 for most models, and indices for some, unless the
        # first number is 1.
        f"target layers that it counts in two ways, {indices}": not default and indices[0] != 2,
    }
    _check_supported(spec, tensors, "SGLang", obstacles)
    exported = _exported_tensors(spec, tensors, verifier)
    if exported.pop("embed_tokens.weight", None) is not None:
        logger.warning(
            "%s has its own embedding, but SGLang uses the target's; it is left out, and if it was "
            "trained, acceptance will be lower",
            spec.what,
        )
    has_head = "lm_head.weight" in exported
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(spec, exported, verifier),
        # Null makes SGLang use the target's output head.
        "draft_vocab_size": _draft_vocab_size(exported, verifier) if has_head else None,
        "target_hidden_size": verifier.text.hidden_size,
        **_norm_switches(spec, exported),
    }
    if not default:
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [index - 1 for index in indices],
            "use_aux_hidden_state": True,
        }
    return config, {name.replace("layers.0.", "midlayer."): t for name, t in exported.items()}


# By the name on the command line.
LAYOUTS: dict[str, Callable[[EagleSpec, Mapping[str, Tensor], Verifier, int], Layout]] = {
    "vllm": for_vllm,
    "sglang": for_sglang,
}


def _check_supported(
    spec: EagleSpec, tensors: Mapping[str, Tensor], engine: str, obstacles: Mapping[str, bool]
) -> None:
    """Raise `AssistantError` for features that an engine would silently ignore."""
    common = {
        "a single, normed state of the target": min(spec.hidden_layers) < 0,
        "a bias before its layer": "fc.bias" in tensors,
        "an embedding scaled by the reader": spec.embedding == "scaled",
    }
    unsupported = [what for what, present in {**common, **obstacles}.items() if present]
    if unsupported:
        other = "" if any(common.values()) else "; vLLM may: --for vllm"
        raise AssistantError(
            f"{spec.what} has what {engine} does not read: {', '.join(unsupported)}{other}"
        )


def _exported_tensors(
    spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier
) -> dict[str, Tensor]:
    """Return the tensors that engines read, with the mask "t2d" of the draft vocabulary."""
    vocab = verifier.text.vocab_size
    exported = dict(tensors)
    if spec.embedding == "target":
        exported.pop("embed_tokens.weight", None)
    if "lm_head.weight" in exported:
        ids = draft_vocab_ids(
            spec.what, exported.get("d2t"), len(exported["lm_head.weight"]), vocab
        )
        # Rows that pad the published vocabulary have no token.
        exported["lm_head.weight"] = exported["lm_head.weight"][:vocab]
        if "d2t" in exported and ids is not None:
            exported["t2d"] = torch.zeros(vocab, dtype=torch.bool)
            exported["t2d"][ids] = True
    output = "layers.0.self_attn.o_proj"
    if f"{output}.bias" not in exported and any(name.endswith("q_proj.bias") for name in exported):
        # Configs have one switch for all four biases.
        exported[f"{output}.bias"] = torch.zeros(len(exported[f"{output}.weight"]))
    return exported


def _draft_vocab_size(tensors: Mapping[str, Tensor], verifier: Verifier) -> int:
    scores = tensors.get("lm_head.weight")
    return int(verifier.text.vocab_size) if scores is None else len(scores)


def _norm_switches(spec: EagleSpec, tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """Return the config switches of the optional norms that this head has."""
    switches = {
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_output": spec.norm_output,
    }
    return {name: True for name, on in switches.items() if on}


def _indices(spec: EagleSpec, verifier: Verifier) -> list[int]:
    """Return the aux layers as indices into `hidden_states`; engines read L before the norm."""
    last = verifier.text.num_hidden_layers
    return [last if index == BEFORE_NORM else index for index in spec.hidden_layers]


def _layer(spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier) -> dict[str, Any]:
    """Return the config of the layers; rotary keys as every version of transformers reads them."""
    layer, scaling = dict(spec.layer), dict(spec.rope)
    layer["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        layer["rope_scaling"] = scaling
    else:
        # Engines stop drafting at this position; default rotary angles exist for every position.
        longest = getattr(verifier.text, "max_position_embeddings", None) or 0
        layer["max_position_embeddings"] = max(layer["max_position_embeddings"], longest)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    more = {"vocab_size": verifier.text.vocab_size, "tie_word_embeddings": False}
    return {**layer, **more, "torch_dtype": dtype}
