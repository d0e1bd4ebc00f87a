"""Layouts of block heads: z-lab, incoai, SpecForge, DeepSpec, speculators, transformers.

Two conventions differ under equal names:

==================  ==============================================================================
outputs             DFlash: an output drafts the token at its own position, so b - 1 of b outputs
                    draft. DSpark: it drafts the token after its position, so all b draft.
layer ids           z-lab, SpecForge and DeepSpec count layer outputs from 0 (-1 is the embedding);
                    speculators use indices into `hidden_states`.
==================  ==============================================================================

transformers' layout (`muse_glimmer_assistant`) is first rewritten as z-lab's. It has other tensor
names, layers that are never causal, and a sliding window that does not count the token itself.

Sizes and counts come from the tensors, since configs are often wrong about them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config

from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.published import (
    PublishedFamily,
    PublishedHead,
    quantization_method,
    register_family,
)
from hf_spec.adapters.reading import whole_number
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.tree_attention import NAME
from hf_spec.engine.forward.vocabulary import PADDED_ROWS
from hf_spec.methods.block import dflash2, markov
from hf_spec.methods.block.head import STRATEGY, BlockHead, BlockShape, block_layer
from hf_spec.methods.block.markov import PREFIX as MARKOV
from hf_spec.methods.published_weights import (
    TARGET_COPIES,
    OutputHead,
    draft_vocab_ids,
    fitted,
    sizes_of,
    with_offsets,
)

DSPARK = "dspark"
FAMILIES = ("dflash", "dflash2", DSPARK)

# Published blocks have up to 16 positions, selectors 16 candidates.
MAX_BLOCK = 256
MAX_CANDIDATES = 4096
MAX_WINDOW = 2**31
# Options of `BlockConfig` that override a head's config.
OVERRIDES = ("aux_layers", "from_anchor", "embedding_scale", "draft_window")
# Keys of the head's config that its layers need.
LAYER_KEYS = (
    "rms_norm_eps",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)
# transformers' layout: the names of its tensors, and the values of entries that a config omits.
TRANSFORMERS_TYPE = "muse_glimmer_assistant"
TRANSFORMERS_NAMES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
TRANSFORMERS_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
TRANSFORMERS_THETA = 500000.0


def build_block_head(head: PublishedHead, target: PreTrainedModel) -> BlockHead:
    """Return the head of published files."""
    if head.config.get("model_type") == TRANSFORMERS_TYPE:
        head = _from_transformers(head)
    _check_variant(head)
    own = {key: t for key, t in head.tensors.items() if not key.startswith(TARGET_COPIES)}
    stored = with_offsets({key.removeprefix("logit_head."): t for key, t in own.items()})
    size, vocab = sizes_of(target)
    config = _layer_config(head, stored)
    draft_vocab_size, vocabulary = _draft_vocabulary(head, stored, vocab)
    expected = _expected_tensors(config, stored, size, vocab)
    width = config.hidden_size
    expected |= markov.expected_tensors(stored, width, draft_vocab_size, vocab)
    expected |= dflash2.expected_tensors(stored, config.num_hidden_layers, width, vocab)
    weights = {key: tensor for key, tensor in stored.items() if key != "d2t"}
    tensors = fitted(head, weights, expected, target)
    embedding: Any = target.get_input_embeddings()
    if "embed_tokens.weight" in tensors:
        embedding = nn.Embedding.from_pretrained(tensors["embed_tokens.weight"])
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in tensors and width != size:
            raise AssistantError(
                f"{head.name!r} has width {width} and has no {name!r}, but the "
                f"target's has width {size}; use a head published for this target"
            )
    output = OutputHead(target, tensors.get("lm_head.weight"), vocabulary)
    base, shape = BaseModel.of(target), _shape(head, config, target)
    return BlockHead(base, shape, config, tensors, embedding, output)


def _check_variant(head: PublishedHead) -> None:
    """Raise `AssistantError` for variants of the layers that are recognized but unsupported."""
    if method := quantization_method(head.config):
        raise AssistantError(
            f"{head.name!r} is stored quantized ({method}), which is not supported for heads; use "
            "the head in bfloat16"
        )
    if sinks := sorted(key for key in head.tensors if "sink" in key.rpartition(".")[2]):
        raise AssistantError(
            f"{head.name!r} has attention sinks ({sinks[0]!r}), which the layers of block heads "
            "do not support; use a head without them"
        )


def _from_transformers(head: PublishedHead) -> PublishedHead:
    """Return a head of transformers' layout in z-lab's."""
    tensors = {TRANSFORMERS_NAMES.get(key, key): t for key, t in head.tensors.items()}
    given = {key: value for key, value in head.config.items() if value is not None}
    config = {**TRANSFORMERS_DEFAULTS, **given, "use_sliding_window": True, "is_causal": False}
    if "layer_types" not in config:
        num_layers = len({key.split(".")[1] for key in tensors if key.startswith("layers.")})
        config["layer_types"] = ["sliding_attention"] * num_layers
    if "rope_parameters" not in config:
        config.setdefault("rope_theta", TRANSFORMERS_THETA)
    what = f"the config of {head.name!r}"
    # Its window is a distance; the windows of other models count the token itself.
    config["sliding_window"] = whole_number(what, config, "sliding_window", 1, MAX_WINDOW) + 1
    return replace(head, config=config, tensors=tensors)


def _draft_vocabulary(
    head: PublishedHead, stored: dict[str, Tensor], vocab: int
) -> tuple[int, Tensor | None]:
    """Return R and the token ids of the R outputs; cut padding rows off `stored`."""
    offsets = stored.get("d2t")
    rows = stored.get("lm_head.weight", offsets)
    draft_vocab_size = vocab if rows is None else len(rows)
    if offsets is None and vocab < draft_vocab_size <= vocab + PADDED_ROWS:
        for name in ("lm_head.weight", f"{MARKOV}markov_w2.weight"):
            if name in stored:
                stored[name] = stored[name][:vocab]
        draft_vocab_size = vocab
    return draft_vocab_size, draft_vocab_ids(repr(head.name), offsets, draft_vocab_size, vocab)


def _option(config: Mapping[str, Any], name: str) -> Any:
    """Return a config value from the level where one of the layouts stores it."""
    for level in (config.get("dflash_config"), config, config.get("transformer_layer_config")):
        if isinstance(level, Mapping) and level.get(name) is not None:
            return level[name]
    return None


def _layer_config(head: PublishedHead, stored: Mapping[str, Tensor]) -> Qwen3Config:
    """Return the config of the layers: sizes from their tensors, the rest from the config."""
    matches = (re.match(r"layers\.(\d{1,3})\.", key) for key in stored)
    layers = {int(match[1]) for match in matches if match}
    if layers != set(range(len(layers))) or not layers or "fc.weight" not in stored:
        raise AssistantError(
            f"{head.name!r} is not a head of the family {head.family!r}: it lacks 'fc.weight' or "
            f"'layers.0' to 'layers.{max(layers, default=0)}'"
        )
    first = "layers.0.self_attn."
    needed = [first + f"{name}.weight" for name in ("q_norm", "q_proj", "k_proj")]
    needed.append("layers.0.mlp.gate_proj.weight")
    if missing := [name for name in needed if name not in stored]:
        raise AssistantError(f"{head.name!r} lacks the tensor {missing[0]!r}")
    head_dim, queries, keys, inner = (stored[name].shape[0] for name in needed)
    options: dict[str, Any] = {"attn_implementation": NAME}
    options |= {k: value for k in LAYER_KEYS if (value := _option(head.config, k)) is not None}
    kinds = _option(head.config, "layer_types")
    if kinds is not None:
        if len(kinds) < len(layers):
            counts = f"{len(kinds)} layer_types for {len(layers)} layers"
            raise AssistantError(f"the config of {head.name!r} names {counts}")
        options["layer_types"] = list(kinds)[: len(layers)]
    return Qwen3Config(
        hidden_size=stored["fc.weight"].shape[0],
        intermediate_size=inner,
        num_hidden_layers=len(layers),
        num_attention_heads=queries // head_dim,
        num_key_value_heads=keys // head_dim,
        head_dim=head_dim,
        attention_bias=first + "q_proj.bias" in stored,
        **options,
    )


def _expected_tensors(
    config: Qwen3Config, stored: Mapping[str, Tensor], size: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the tensors of the backbone must have."""
    with torch.device("meta"):
        layer = block_layer(config, 0, {}, 0).state_dict()
    width = config.hidden_size
    num_states = max(stored["fc.weight"].shape[-1] // size, 1)
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, num_states * size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(config.num_hidden_layers):
        expected |= {f"layers.{index}.{name}": tuple(t.shape) for name, t in layer.items()}
    if "embed_tokens.weight" in stored:
        expected["embed_tokens.weight"] = (vocab, width)
    if (output := stored.get("lm_head.weight")) is not None:
        expected["lm_head.weight"] = (output.shape[0], width)
    return expected


def _shape(head: PublishedHead, config: Qwen3Config, target: PreTrainedModel) -> BlockShape:
    what = f"the config of {head.name!r}"
    overrides = dict(head.overrides)
    text: Any = target.config.get_text_config()
    names = ("block_size", "mask_token_id", "selector_top_k")
    sizes = {key: _option(head.config, key) for key in names}
    num_candidates = 0
    if dflash2.has_selector(head.tensors):
        num_candidates = whole_number(what, sizes, "selector_top_k", 1, MAX_CANDIDATES)
    from_anchor = overrides.get("from_anchor", _option(head.config, "sample_from_anchor"))
    if from_anchor is None:
        # DeepSpec names some DSpark checkpoints dflash; their class decides.
        from_anchor = head.family == DSPARK
    scales = {
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": 0.0,
    }
    for name, default in scales.items():
        value = _option(head.config, name)
        scales[name] = default if value is None else value
        if not isinstance(scales[name], (int, float)) or not math.isfinite(scales[name]):
            raise AssistantError(f"{what} has {name}={value!r}, which is not a finite number")
    scale = overrides.get("embedding_scale", scales["input_embedding_scale"])
    embeddings: Any = target.get_input_embeddings()
    return BlockShape(
        whole_number(what, sizes, "block_size", 2, MAX_BLOCK),
        bool(from_anchor),
        whole_number(what, sizes, "mask_token_id", 0, embeddings.weight.shape[0] - 1),
        _hidden_layers(head, text),
        tuple(_causal(head, config, index) for index in range(config.num_hidden_layers)),
        float(scale),
        float(scales["output_multiplier"]),
        float(scales["final_logit_softcapping"]),
        num_candidates,
        overrides.get("draft_window"),
    )


def _hidden_layers(head: PublishedHead, text: Any) -> tuple[int, ...]:
    """Return the indices into `hidden_states` from the overrides or the config."""
    ids: Any = dict(head.overrides).get("aux_layers")
    shift = 0
    if ids is None:
        ids = _option(head.config, "aux_hidden_state_layer_ids")
    if ids is None:
        ids, shift = _option(head.config, "target_layer_ids"), 1
    if ids is None:
        raise AssistantError(
            f"the config of {head.name!r} has no target_layer_ids, so it is unknown which hidden "
            "states the head reads; pass BlockConfig(aux_layers=[...]) with the indices that it "
            "was trained on"
        )
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int for i in ids):
        raise AssistantError(
            f"{head.name!r} reads the layers {ids!r:.60}, which is not a list of whole numbers"
        )
    layers = tuple(i + shift for i in ids)
    count = head.tensors["fc.weight"].shape[1] // text.hidden_size
    if len(layers) != count or not all(0 <= i <= text.num_hidden_layers for i in layers):
        raise AssistantError(
            f"{head.name!r} is configured for the hidden states {list(layers)}, but its weights "
            f"read {count} of width {text.hidden_size}, from 0 to {text.num_hidden_layers}; pass "
            f"BlockConfig(aux_layers=[...]) with {count} indices"
        )
    return layers


def _causal(head: PublishedHead, config: Qwen3Config, index: int) -> bool:
    """Return True for causal layers: sliding ones are unless the config differs."""
    causal = _option(head.config, "is_causal")
    if causal is None:
        slides = (config.layer_types or [])[index] == "sliding_attention"
        causal = slides and not _option(head.config, "sliding_window_non_causal")
    return bool(causal)


for _family in FAMILIES:
    register_family(PublishedFamily(_family, STRATEGY, build_block_head))
