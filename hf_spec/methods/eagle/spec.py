"""What a published EAGLE head is: sizes from its tensors, switches and layers from its config.

There are three layouts of one head. SafeAILab's is a Llama config of one layer with a
`draft_vocab_size`; SpecForge and SGLang add `eagle_config`; vLLM's speculators put the layer into
`transformer_layer_config`. Wrong readings never fail, they only draft worse, so each rule below
says where it comes from, and what configs leave open can be said by the user (`Reading`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_spec.adapters.published import PublishedHead
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.forward.output import default_aux_layers

logger = logging.getLogger(__name__)

# RoPE's base where a config names none, whatever the target's own is.
THETA = 10000.0
EMBEDDINGS = ("target", "own", "scaled")
# Projections that may have one.
BIASES = ("q_proj", "k_proj", "v_proj", "o_proj")
# Names under which the token of places to come is published.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class Reading:
    """What a user says of a head against its config; None as the config says.

    Attributes:
        aux_layers: indices into the target's `hidden_states` whose states it reads.
        rope_theta: base of its rotary positions.
        embedding: "target", the target's table; "own", the one in its files; "scaled", the
            target's times the square root of its width, as Gemma's layers get it.
        norm_before_residual: whether the residual of its attention is the normed feature.
        norm_output: whether the feature handed to its next step is normed.
    """

    aux_layers: tuple[int, ...] | None = None
    rope_theta: float | None = None
    embedding: str | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None


@dataclass(frozen=True)
class EagleSpec:
    """Sizes, switches and layers of a head.

    Attributes:
        what: it is called in messages.
        hidden_size, inner_size: h, and the width of its MLP.
        num_layers, num_heads, num_key_heads, head_size: of its attention.
        layer: the config of its layers, for what tensors do not show.
        rope: RoPE's parameters as transformers takes them.
        hidden_layers: indices into the target's `hidden_states`, or `BEFORE_NORM`, of which each
            gives a part of a feature.
        embedding: see `Reading`.
        norm_before_residual, norm_output: see `Reading`.
        mask_token: of the pairs that stand for tokens to come; None where it drafts step by step.
    """

    what: str
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_size: int
    layer: Mapping[str, Any]
    rope: dict[str, Any]
    hidden_layers: tuple[int, ...]
    embedding: str
    norm_before_residual: bool
    norm_output: bool
    mask_token: int | None


def read_spec(head: PublishedHead, tensors: Mapping[str, Tensor], text: Any) -> EagleSpec:
    """The spec of a head for a target, of which `text` is the config of its text model.

    `tensors` are the head's own, by the names of `normal_names`.

    Raises:
        AssistantError: if it is damaged or for a target of other sizes.
    """
    what = f"the {head.family} head {head.name!r}"
    reading, config = Reading(**dict(head.overrides)), head.config
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, Mapping):
        raise AssistantError(f"{what} is damaged: transformer_layer_config={layer!r:.60}")
    if any(".kv_a_proj" in key for key in tensors):
        raise AssistantError(f"{what} has multi-head latent attention, which cannot be used yet")
    hidden_size, width = shape_of(what, tensors, "fc.weight")
    heads, key_heads, head_size = _heads(what, tensors, layer)
    first = head.family == "eagle"
    _check_target(what, config, text)
    count = _num_features(what, width, hidden_size if first else 0, text.hidden_size)
    aux = (-1,) if first else _aux_layers(what, head, reading, count, text.num_hidden_layers)
    flags = {
        name: _flag(what, config, reading, name) for name in ("norm_before_residual", "norm_output")
    }
    return EagleSpec(
        what=what,
        hidden_size=hidden_size,
        inner_size=shape_of(what, tensors, "layers.0.mlp.gate_proj.weight")[0],
        num_layers=_num_layers(what, tensors),
        num_heads=heads,
        num_key_heads=key_heads,
        head_size=head_size,
        layer=layer,
        rope=_rope(what, layer, reading),
        # Heads that read three states take the last one before the norm, which index L is not.
        hidden_layers=tuple(BEFORE_NORM if i == text.num_hidden_layers else i for i in aux),
        embedding=_embedding(what, head, tensors, reading, hidden_size == text.hidden_size),
        mask_token=_mask_token(what, config) if head.family == "peagle" else None,
        **flags,
    )


def normal_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of the speculators layout, what can be computed left out."""
    named = {key.replace("midlayer.", "layers.0.", 1): t for key, t in tensors.items()}
    return {k: t for k, t in named.items() if k != "t2d" and not k.endswith("rotary_emb.inv_freq")}


def shape_of(what: str, tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """The shape of a matrix that every head has."""
    shape = tuple(tensors[name].shape) if name in tensors else ()
    if len(shape) != 2 or 0 in shape:
        raise AssistantError(f"{what} is damaged: {name} is {shape or 'missing'}, no matrix")
    return shape[0], shape[1]


def layer_config(spec: EagleSpec, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What configs of transformers say of a head's layers, all but their rotary positions."""
    attention = "layers.0.self_attn."
    return {
        "model_type": "qwen3" if f"{attention}q_norm.weight" in tensors else "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.inner_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_key_heads,
        "head_dim": spec.head_size,
        "hidden_act": spec.layer.get("hidden_act", "silu"),
        "rms_norm_eps": spec.layer.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": spec.layer.get("max_position_embeddings", 2048),
        "attention_bias": any(f"{attention}{name}.bias" in tensors for name in BIASES),
    }


def _heads(
    what: str, tensors: Mapping[str, Tensor], layer: Mapping[str, Any]
) -> tuple[int, int, int]:
    """Heads, key heads and the size of one; sizes as tensors have them."""
    attention = "layers.0.self_attn."
    inner = shape_of(what, tensors, f"{attention}o_proj.weight")[1]
    keys = shape_of(what, tensors, f"{attention}k_proj.weight")[0]
    normed = tensors.get(f"{attention}q_norm.weight")
    size = len(normed) if normed is not None else layer.get("head_dim")
    if size is None:
        count = layer.get("num_attention_heads")
        size = inner // count if type(count) is int and count > 0 else 0
    if type(size) is not int or size < 2 or size % 2 or inner % size or keys % size:
        raise AssistantError(
            f"{what} is damaged: heads of size {size!r} make neither {inner} nor {keys}"
        )
    return inner // size, keys // size, size


def _num_layers(what: str, tensors: Mapping[str, Tensor]) -> int:
    found = {key.split(".")[1] for key in tensors if key.startswith("layers.")}
    if found != {str(index) for index in range(len(found))}:
        raise AssistantError(f"{what} is damaged: it has the layers {', '.join(sorted(found))}")
    return len(found)


def _num_features(what: str, width: int, own: int, target_size: int) -> int:
    """How many of the target's states make a feature; `own` inputs are the embedding's."""
    if width <= own or (width - own) % target_size:
        raise AssistantError(
            f"{what} is for another target: its fc reads {width - own} numbers a token, and this "
            f"target's states have {target_size}"
        )
    return (width - own) // target_size


def _check_target(what: str, config: Mapping[str, Any], text: Any) -> None:
    said = config.get("target_hidden_size")
    if said is not None and said != text.hidden_size:
        raise AssistantError(
            f"{what} is for a target of hidden size {said}; this one has {text.hidden_size}"
        )


def _aux_layers(
    what: str, head: PublishedHead, reading: Reading, count: int, num_layers: int
) -> tuple[int, ...]:
    """Indices into `hidden_states`; configs mean these, or layers counted from 0."""
    config, usual = head.config, default_aux_layers(num_layers)
    ids, how = reading.aux_layers, "given"
    if ids is None:
        ids, how = _configured(config, usual)
        if ids is None and count == 1:
            ids, how = (-1,), "of a single state"
    if ids is None:
        ids, how = usual, "by default"
        logger.warning("%s does not say which layers it reads; taken are %s", what, usual)
    if len(ids) != count or not all(
        type(index) is int and -1 <= index <= num_layers for index in ids
    ):
        raise AssistantError(
            f"{what} reads {count} states of a token, and the layers {how} are {list(ids)}, of "
            f"{num_layers}: pass aux_layers= with {count} indices into hidden_states"
        )
    return tuple(ids)


def _configured(
    config: Mapping[str, Any], usual: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, str]:
    """The layers that a config names, as indices."""
    inner = config.get("eagle_config")
    inner = inner if isinstance(inner, Mapping) else {}
    if inner.get("use_aux_hidden_state") is False:
        return (-1,), "of a single state"
    if (counted := _numbers(config.get("target_layer_ids"))) is not None:
        # DeepSpec counts layers, the embedding as -1.
        return tuple(index + 1 for index in counted), "in target_layer_ids"
    name = "eagle_aux_hidden_state_layer_ids"
    counted = _numbers(inner.get(name))
    ids = counted if counted is not None else _numbers(config.get(name))
    if ids is None:
        return None, ""
    after = tuple(index + 1 for index in ids)
    # SpecForge and SGLang count the outputs of layers from 0; converted configs carry such numbers
    # into other layouts. SGLang itself shifts where the first is 1.
    if after == usual or (tuple(ids) != usual and counted is not None and ids[:1] == [1]):
        return after, f"in {name}, counted from 0,"
    return tuple(ids), f"in {name}"


def _numbers(value: Any) -> list[int] | None:
    known = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return list(value) if known and all(type(one) is int for one in value) else None


def _rope(what: str, layer: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """RoPE's parameters of the head's own config, never the target's."""
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    found = dict(found) if isinstance(found, Mapping) else {}
    kind = found.pop("type", None)
    theta = reading.rope_theta or found.get("rope_theta") or layer.get("rope_theta") or THETA
    if type(theta) not in (int, float) or not theta > 0:
        raise AssistantError(f"{what} is damaged: rope_theta={theta!r}")
    return {"rope_type": kind or "default", **found, "rope_theta": float(theta)}


def _embedding(
    what: str,
    head: PublishedHead,
    tensors: Mapping[str, Tensor],
    reading: Reading,
    fits_target: bool,
) -> str:
    """Exports of SpecForge drop the table or hold an untrained one, speculators ship theirs."""
    shipped = "embed_tokens.weight" in tensors
    trusted = head.config.get("speculators_model_type") or head.family == "peagle"
    usual = "own" if shipped and (trusted or not fits_target) else "target"
    chosen = reading.embedding or usual
    if chosen == "own" and not shipped:
        raise AssistantError(f"{what} has no embedding of its own; leave embedding='own' out")
    if chosen != "own" and not fits_target:
        raise AssistantError(
            f"{what} is of another width than this target, and has no embedding of its own"
        )
    return chosen


def _mask_token(what: str, config: Mapping[str, Any]) -> int:
    inner = config.get("dflash_config")
    levels = [config, inner if isinstance(inner, Mapping) else {}]
    found = [level[name] for level in levels for name in MASK_TOKENS if level.get(name) is not None]
    if not found or type(found[0]) is not int or found[0] < 0:
        raise AssistantError(f"{what} does not say which token stands for those to come: {found}")
    return int(found[0])


def _flag(what: str, config: Mapping[str, Any], reading: Reading, name: str) -> bool:
    said = getattr(reading, name)
    value = config.get(name) or False if said is None else said
    if not isinstance(value, bool):
        raise AssistantError(f"{what} is damaged: {name}={value!r} is neither true nor false")
    return value
