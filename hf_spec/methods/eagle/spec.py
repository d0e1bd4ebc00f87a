"""Spec of a published EAGLE head: sizes from its tensors, switches and layers from its config.

One network is published in three layouts: SafeAILab's is a Llama config of one layer with a
`draft_vocab_size`; SpecForge and SGLang add `eagle_config`; vLLM's speculators put the layer into
`transformer_layer_config`. A misread config raises no error, it only lowers acceptance. So each
rule below names its source, and the user can override the config (`OVERRIDES`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_spec.adapters.published import PublishedHead
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.methods.published_weights import TARGET_COPIES, with_offsets

logger = logging.getLogger(__name__)

# Rotary base of configs that name none, whatever the target's is.
THETA = 10000.0
ROPE_TYPES = tuple(sorted({"default", *ROPE_INIT_FUNCTIONS}))
EMBEDDINGS = ("target", "own", "scaled")
# Options of `EagleConfig` that override a head's config.
OVERRIDES = (
    "aux_layers",
    "rope_theta",
    "embedding",
    "norm_before_residual",
    "norm_output",
    "draft_window",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
Overrides = Mapping[str, Any]
# Prefixes in the files of a head -> those of EAGLE-3 in the speculators layout.
LAYER_PARTS = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
# Config keys of P-EAGLE's mask token.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class EagleSpec:
    """Layers and switches of a head.

    Attributes:
        what: names the head in messages.
        layer: transformers config of the layers, without rotary parameters.
        rope: rotary parameters in the format of transformers.
        hidden_layers: indices into the target's `hidden_states`, or `BEFORE_NORM`; their states
            are concatenated into a feature.
        embedding, norm_before_residual, norm_output, draft_window: see `EagleConfig`.
        mask_token: token id of P-EAGLE's mask pairs; None for heads that draft step by step.
    """

    what: str
    layer: dict[str, Any]
    rope: dict[str, Any]
    hidden_layers: tuple[int, ...]
    embedding: str
    norm_before_residual: bool
    norm_output: bool
    mask_token: int | None
    draft_window: int | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the head, h."""
        width: int = self.layer["hidden_size"]
        return width


def read_spec(head: PublishedHead, tensors: Mapping[str, Tensor], text: Any) -> EagleSpec:
    """Return the spec of a head from its tensors, renamed by `canonical_names`.

    `text` is the config of the target's text model. A damaged head, or one for a target of other
    sizes, raises `AssistantError`.
    """
    what = f"the {head.family} head {head.name!r}"
    overrides, config = dict(head.overrides), head.config
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, Mapping):
        raise AssistantError(f"{what} is damaged: transformer_layer_config={layer!r:.60}")
    if any(".kv_a_proj" in key for key in tensors):
        raise AssistantError(
            f"{what} has multi-head latent attention, which is not supported; use a head with "
            "q_proj, k_proj and v_proj"
        )
    if config.get("layernorms"):
        raise AssistantError(
            f"{what} is EAGLE-1 with extra norms (layernorms={config['layernorms']!r}), which is "
            "not supported; use an EAGLE-3 head for this target"
        )
    hidden_size, width = matrix_shape(what, tensors, "fc.weight")
    first = head.family == "eagle"
    count = _num_states(what, config, text, width - (hidden_size if first else 0))
    aux = (-1,) if first else _aux_layers(what, head, overrides, count, text.num_hidden_layers)
    return EagleSpec(
        what=what,
        layer=_layer_config(what, tensors, layer),
        rope=_rope(what, layer, overrides),
        # EAGLE-3 reads the last layer's output before the final norm; index L is after it.
        hidden_layers=tuple(BEFORE_NORM if i == text.num_hidden_layers else i for i in aux),
        embedding=_embedding(what, head, tensors, overrides, hidden_size == text.hidden_size),
        norm_before_residual=_flag(what, config, overrides, "norm_before_residual"),
        norm_output=_flag(what, config, overrides, "norm_output"),
        mask_token=_mask_token(what, config) if head.family == "peagle" else None,
        draft_window=overrides.get("draft_window"),
    )


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names of EAGLE-3 in the speculators layout.

    Computable tensors and copies of the target's are left out.
    """
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(TARGET_COPIES) and not key.endswith("rotary_emb.inv_freq"):
            part = next((part for part in LAYER_PARTS if key.startswith(part)), "")
            named[LAYER_PARTS.get(part, "") + key.removeprefix(part)] = tensor
    return with_offsets(named)


def verifier_name(config: Mapping[str, Any]) -> str | None:
    """Return the target that a head names; None if it names none."""
    inner = config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def matrix_shape(what: str, tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """Return the shape of a matrix that every head has; `AssistantError` without it."""
    shape = tuple(tensors[name].shape) if name in tensors else ()
    if len(shape) != 2 or 0 in shape:
        raise AssistantError(f"{what} is damaged: {name} is {shape or 'missing'}, not a matrix")
    return shape[0], shape[1]


def _layer_config(
    what: str, tensors: Mapping[str, Tensor], layer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the transformers config of the layers: sizes from tensors, the rest from `layer`."""
    attention = "layers.0.self_attn."
    inner = matrix_shape(what, tensors, f"{attention}o_proj.weight")[1]
    keys = matrix_shape(what, tensors, f"{attention}k_proj.weight")[0]
    normed = tensors.get(f"{attention}q_norm.weight")
    size = len(normed) if normed is not None else layer.get("head_dim")
    if size is None:
        count = layer.get("num_attention_heads")
        size = inner // count if type(count) is int and count > 0 else 0
    if type(size) is not int or size < 2 or size % 2 or inner % size or keys % size:
        raise AssistantError(
            f"{what} is damaged: its projections of width {inner} and {keys} do not split into "
            f"heads of size {size!r}"
        )
    return {
        "model_type": "llama" if normed is None else "qwen3",
        "hidden_size": len(tensors["fc.weight"]),
        "intermediate_size": matrix_shape(what, tensors, "layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": _num_layers(what, tensors),
        "num_attention_heads": inner // size,
        "num_key_value_heads": keys // size,
        "head_dim": size,
        "hidden_act": layer.get("hidden_act", "silu"),
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": layer.get("max_position_embeddings", 2048),
        "attention_bias": any(f"{attention}{name}.bias" in tensors for name in PROJECTIONS),
    }


def _num_layers(what: str, tensors: Mapping[str, Tensor]) -> int:
    layers = {key.split(".")[1] for key in tensors if key.startswith("layers.")}
    if layers != {str(index) for index in range(len(layers))}:
        raise AssistantError(f"{what} is damaged: it has the layers {', '.join(sorted(layers))}")
    return len(layers)


def _num_states(what: str, config: Mapping[str, Any], text: Any, features: int) -> int:
    """Return how many hidden states of the target make a feature of that width."""
    size = config.get("target_hidden_size")
    if size is not None and size != text.hidden_size:
        raise AssistantError(
            f"{what} is for a target of hidden size {size}; this one has {text.hidden_size}"
        )
    if features <= 0 or features % text.hidden_size:
        raise AssistantError(
            f"{what} is for another target: its fc reads {features} numbers a token, but this "
            f"target's states have {text.hidden_size}"
        )
    return features // text.hidden_size


def _aux_layers(
    what: str, head: PublishedHead, overrides: Overrides, count: int, num_layers: int
) -> tuple[int, ...]:
    """Return `count` indices into `hidden_states`: overridden, configured, or the default."""
    default = default_aux_layers(num_layers)
    ids, source = overrides.get("aux_layers"), "given"
    if ids is None:
        ids, source = _configured_layers(head.config, default)
        if ids is None and count == 1:
            ids, source = (-1,), "of a single state"
    if ids is None:
        ids, source = default, "by default"
        logger.warning(
            "the config of %s does not name its aux layers; using %s, which may lower acceptance "
            "(pass aux_layers=, or run hf-spec check-head)",
            what,
            default,
        )
    if len(ids) != count or not all(
        type(index) is int and -1 <= index <= num_layers for index in ids
    ):
        raise AssistantError(
            f"{what} reads {count} states of a token, but the layers {source} are {list(ids)} of "
            f"{num_layers}: pass aux_layers= with {count} indices into hidden_states"
        )
    return tuple(ids)


def _configured_layers(
    config: Mapping[str, Any], default: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, str]:
    """Return the indices into `hidden_states` that a config names, and how it names them."""
    inner = config.get("eagle_config")
    inner = inner if isinstance(inner, Mapping) else {}
    if inner.get("use_aux_hidden_state") is False:
        return (-1,), "of a single state"
    if (outputs := _int_list(config.get("target_layer_ids"))) is not None:
        # DeepSpec counts layer outputs from 0; -1 is the embedding.
        return tuple(index + 1 for index in outputs), "in target_layer_ids"
    name = "eagle_aux_hidden_state_layer_ids"
    nested = _int_list(inner.get(name))
    ids = nested if nested is not None else _int_list(config.get(name))
    if ids is None:
        return None, ""
    shifted = tuple(index + 1 for index in ids)
    # SpecForge and SGLang count layer outputs from 0; converted configs carry such ids into other
    # layouts. SGLang itself shifts only if the first id is 1.
    if shifted == default or (tuple(ids) != default and nested is not None and ids[:1] == [1]):
        return shifted, f"in {name}, counted from 0,"
    return tuple(ids), f"in {name}"


def _int_list(value: Any) -> list[int] | None:
    """Return a non-empty list of ints; None for any other value."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return list(value) if is_list and all(type(item) is int for item in value) else None


def _rope(what: str, layer: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return rotary parameters from the head's own config, never from the target's."""
    stored = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    rope = dict(stored) if isinstance(stored, Mapping) else {}
    kind = rope.pop("rope_type", rope.pop("type", None)) or "default"
    # Pairs have one position, for which the three axes of images are equal.
    kind = "default" if kind == "mrope" else kind
    if kind not in ROPE_TYPES:
        raise AssistantError(
            f"{what} has rope_type={kind!r}, which is not supported; choose a head with one of "
            f"{', '.join(ROPE_TYPES)}"
        )
    partial = rope.get("partial_rotary_factor", layer.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise AssistantError(
            f"{what} rotates a part of its queries and keys (partial_rotary_factor={partial!r}), "
            "which is not supported; use a head that rotates all of them"
        )
    theta = (
        overrides.get("rope_theta") or rope.get("rope_theta") or layer.get("rope_theta") or THETA
    )
    if type(theta) not in (int, float) or not theta > 0:
        raise AssistantError(f"{what} is damaged: rope_theta={theta!r}")
    return {"rope_type": kind, **rope, "rope_theta": float(theta)}


def _embedding(
    what: str,
    head: PublishedHead,
    tensors: Mapping[str, Tensor],
    overrides: Overrides,
    fits_target: bool,
) -> str:
    """Return which embedding to use.

    SpecForge exports drop the table or hold an untrained one; speculators ship a trained one.
    """
    shipped = "embed_tokens.weight" in tensors
    trusted = head.config.get("speculators_model_type") or head.family == "peagle"
    default = "own" if shipped and (trusted or not fits_target) else "target"
    chosen = overrides.get("embedding") or default
    if chosen == "own" and not shipped:
        raise AssistantError(f"{what} has no embedding of its own; leave out embedding='own'")
    if chosen != "own" and not fits_target:
        raise AssistantError(
            f"{what} has another width than this target, and has no embedding of its own; use a "
            "head published for this target"
        )
    return chosen


def _mask_token(what: str, config: Mapping[str, Any]) -> int:
    inner = config.get("dflash_config")
    levels = [config, inner if isinstance(inner, Mapping) else {}]
    ids = [level[name] for level in levels for name in MASK_TOKENS if level.get(name) is not None]
    if not ids or type(ids[0]) is not int or ids[0] < 0:
        raise AssistantError(
            f"the config of {what} names no mask token id ({', '.join(MASK_TOKENS)}): {ids}"
        )
    return int(ids[0])


def _flag(what: str, config: Mapping[str, Any], overrides: Overrides, name: str) -> bool:
    value = overrides.get(name)
    value = config.get(name) or False if value is None else value
    if not isinstance(value, bool):
        raise AssistantError(f"{what} is damaged: {name}={value!r} is neither true nor false")
    return value
