"""The layouts in which other engines read EAGLE-3 heads: vLLM's of speculators, and SGLang's.

vLLM puts the layer's config into `transformer_layer_config` beside the verifier, and counts target
layers as indices into `hidden_states`. SGLang reads SafeAILab's layout as SpecForge writes it: one
flat Llama config, the first layer under the name of `midlayer`, and target layers in
`eagle_config`. Weights are the same in both; an embedding is left out where it is the target's,
which both engines then share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.methods.eagle.spec import EagleSpec, layer_config
from hf_spec.methods.published_weights import known_tokens

logger = logging.getLogger(__name__)

# Config and tensors of a head's files.
Layout = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Verifier:
    """The target that a head is for.

    Attributes:
        name: its Hub id or folder.
        architectures: its classes, as its config names them.
        text: the config of its text model.
    """

    name: str
    architectures: tuple[str, ...]
    text: Any


def for_vllm(
    spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier, steps: int
) -> Layout:
    """The files of a head for vLLM, which is to draft `steps` tokens a round.

    `tensors` are those of the head by the names of `normal_names`.

    Raises:
        AssistantError: if vLLM has no such network, or tokens of the head are not the target's.
    """
    _check(spec, tensors, "vLLM", {})
    known = _with_tokens(spec, tensors, verifier)
    kind = "eagle3" if spec.mask_token is None else "peagle"
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        "speculators_model_type": kind,
        "draft_vocab_size": _num_known(known, verifier),
        "eagle_aux_hidden_state_layer_ids": _indices(spec, verifier),
        # Said in any case: where it is missing, vLLM takes it for true and speculators for false.
        "norm_before_residual": spec.norm_before_residual,
        **_norms(spec, known),
        "target_hidden_size": verifier.text.hidden_size,
        "transformer_layer_config": _layer(spec, known, verifier),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {
                "name_or_path": verifier.name,
                "architectures": list(verifier.architectures),
            },
        },
    }
    if spec.mask_token is not None:
        config["mask_token_id"] = spec.mask_token
    return config, known


def for_sglang(
    spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier, steps: int
) -> Layout:
    """The files of a head for SGLang, which is told by its command how many tokens to draft.

    `tensors` are those of the head by the names of `normal_names`.

    Raises:
        AssistantError: if SGLang has no such network, or tokens of the head are not the target's.
    """
    indices = _indices(spec, verifier)
    usual = indices == list(default_aux_layers(verifier.text.num_hidden_layers))
    obstacles = {
        "drafts in one pass (P-EAGLE)": spec.mask_token is not None,
        "several layers": spec.num_layers > 1,
        "the normed feature as a residual (norm_before_residual)": spec.norm_before_residual,
        "norms of queries and keys": "layers.0.self_attn.q_norm.weight" in tensors,
        "biases": any(name.endswith(".bias") for name in tensors),
        "an embedding of another width than the target's": (
            spec.hidden_size != verifier.text.hidden_size
        ),
        # Outputs from 0 for most of its models, indices for some, unless the first number is 1.
        f"target layers that it counts in two ways, {indices}": not usual and indices[0] != 2,
    }
    _check(spec, tensors, "SGLang", obstacles)
    known = _with_tokens(spec, tensors, verifier)
    if known.pop("embed_tokens.weight", None) is not None:
        logger.warning(
            "%s has an embedding of its own, in place of which SGLang takes the target's; it is "
            "left out, and if it was trained, drafts will be worse",
            spec.what,
        )
    own_head = "lm_head.weight" in known
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(spec, known, verifier),
        # Without a head of its own it gets the target's where this is null.
        "draft_vocab_size": _num_known(known, verifier) if own_head else None,
        "target_hidden_size": verifier.text.hidden_size,
        **_norms(spec, known),
    }
    if not usual:
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [index - 1 for index in indices],
            "use_aux_hidden_state": True,
        }
    return config, {name.replace("layers.0.", "midlayer."): t for name, t in known.items()}


# By the name that a user gives.
LAYOUTS: dict[str, Callable[[EagleSpec, Mapping[str, Tensor], Verifier, int], Layout]] = {
    "vllm": for_vllm,
    "sglang": for_sglang,
}


def _check(
    spec: EagleSpec, tensors: Mapping[str, Tensor], engine: str, obstacles: Mapping[str, bool]
) -> None:
    """Refuse a head with something that an engine does not read, and would not miss."""
    common = {
        "a single, normed state of the target": min(spec.hidden_layers) < 0,
        "a bias before its layer": "fc.bias" in tensors,
        "an embedding scaled by the reader": spec.embedding == "scaled",
    }
    found = [what for what, is_there in {**common, **obstacles}.items() if is_there]
    if found:
        other = "" if any(common.values()) else "; vLLM may: --for vllm"
        raise AssistantError(
            f"{spec.what} has what {engine} does not read: {', '.join(found)}{other}"
        )


def _with_tokens(
    spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier
) -> dict[str, Tensor]:
    """The tensors with the mask of known tokens, those left out that engines would not read."""
    vocab = verifier.text.vocab_size
    known = dict(tensors)
    if spec.embedding == "target":
        known.pop("embed_tokens.weight", None)
    if "lm_head.weight" in known:
        ids = known_tokens(spec.what, known.get("d2t"), len(known["lm_head.weight"]), vocab)
        # Rows that pad the published vocabulary stand for no token.
        known["lm_head.weight"] = known["lm_head.weight"][:vocab]
        if "d2t" in known and ids is not None:
            known["t2d"] = torch.zeros(vocab, dtype=torch.bool)
            known["t2d"][ids] = True
    output = "layers.0.self_attn.o_proj"
    if f"{output}.bias" not in known and any(name.endswith("q_proj.bias") for name in known):
        # Configs have one word for all four biases.
        known[f"{output}.bias"] = torch.zeros(len(known[f"{output}.weight"]))
    return known


def _num_known(tensors: Mapping[str, Tensor], verifier: Verifier) -> int:
    scores = tensors.get("lm_head.weight")
    return int(verifier.text.vocab_size) if scores is None else len(scores)


def _norms(spec: EagleSpec, tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """The switches of norms that not every head has."""
    switches = {
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_output": spec.norm_output,
    }
    return {name: True for name, on in switches.items() if on}


def _indices(spec: EagleSpec, verifier: Verifier) -> list[int]:
    """Indices into `hidden_states`; engines take the last one before the norm."""
    last = verifier.text.num_hidden_layers
    return [last if index == BEFORE_NORM else index for index in spec.hidden_layers]


def _layer(spec: EagleSpec, tensors: Mapping[str, Tensor], verifier: Verifier) -> dict[str, Any]:
    """The config of the head's layers, rotary positions as every version of transformers reads."""
    layer = layer_config(spec, tensors)
    scaling = dict(spec.rope)
    layer["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        layer["rope_scaling"] = scaling
    else:
        # Engines draft no further than this, and any position can be computed.
        longest = getattr(verifier.text, "max_position_embeddings", None) or 0
        layer["max_position_embeddings"] = max(layer["max_position_embeddings"], longest)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    more = {"vocab_size": verifier.text.vocab_size, "tie_word_embeddings": False}
    return {**layer, **more, "torch_dtype": dtype}
