"""Reading DFlash and DSpark heads as they are published, in four layouts.

Layouts that are alike and mean something else:

=====================  ===========================================================================
what an output drafts  in DFlash the token at its own place, so the first of b outputs drafts
                       nothing; in DSpark the token after its place, so b are drafted
layer ids              z-lab, SpecForge and DeepSpec count the outputs of layers from 0 (-1 is the
                       embedding); vLLM's "speculators" count hidden states
=====================  ===========================================================================

Sizes and counts follow from the tensors, which configs are often wrong about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config

from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.adapters.reading import whole_number
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.vocabulary import PADDED_ROWS
from hf_spec.methods.block.head import STRATEGY, BlockHead, BlockLayer, BlockShape, LayerKind
from hf_spec.methods.block.markov import PREFIX as MARKOV
from hf_spec.methods.block.markov import expected_tensors
from hf_spec.methods.published_weights import OutputHead, fitted, known_tokens, sizes_of

DFLASH, DSPARK = "dflash", "dspark"

# Larger than any block that was published, by a factor of sixteen.
MAX_BLOCK = 256
# What the layers are told of their config.
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


def build_block_head(head: PublishedHead, target: PreTrainedModel) -> BlockHead:
    """A DFlash or DSpark head in z-lab's, SpecForge's, DeepSpec's or the speculators layout."""
    given = {key.removeprefix("logit_head."): tensor for key, tensor in head.tensors.items()}
    size, vocab = sizes_of(target)
    config = _layer_config(head, given)
    num_known, vocabulary = _known(head, given, vocab)
    expected = _expected(config, given, size, vocab)
    expected |= expected_tensors(given, config.hidden_size, num_known, vocab)
    tensors = fitted(
        head, {k: t for k, t in given.items() if k not in ("d2t", "t2d")}, expected, target
    )
    embedding: Any = target.get_input_embeddings()
    if "embed_tokens.weight" in tensors:
        embedding = nn.Embedding.from_pretrained(tensors["embed_tokens.weight"])
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in tensors and config.hidden_size != size:
            raise AssistantError(
                f"{head.name!r} is {config.hidden_size} wide and has no {name!r}, and the target's "
                f"is {size} wide"
            )
    output = OutputHead(target, tensors.get("lm_head.weight"), vocabulary)
    base, shape = BaseModel.of(target), _shape(head, config, target)
    return BlockHead(base, shape, config, tensors, embedding, output)


def _known(head: PublishedHead, given: dict[str, Tensor], vocab: int) -> tuple[int, Tensor | None]:
    """R and the tokens that these outputs stand for; cuts off rows that pad the vocabulary."""
    offsets = given.get("d2t")
    own = given.get("lm_head.weight", offsets)
    num_known = vocab if own is None else len(own)
    if offsets is None and vocab < num_known <= vocab + PADDED_ROWS:
        for name in ("lm_head.weight", f"{MARKOV}markov_w2.weight"):
            if name in given:
                given[name] = given[name][:vocab]
        num_known = vocab
    return num_known, known_tokens(repr(head.name), offsets, num_known, vocab)


def _look(config: Mapping[str, Any], name: str) -> Any:
    """An option, wherever the layouts have it."""
    for level in (config.get("dflash_config"), config, config.get("transformer_layer_config")):
        if isinstance(level, Mapping) and level.get(name) is not None:
            return level[name]
    return None


def _layer_config(head: PublishedHead, given: Mapping[str, Tensor]) -> Qwen3Config:
    """What the layers are built from: the sizes of their tensors, the rest of the config."""
    layers = {int(found[1]) for key in given if (found := re.match(r"layers\.(\d{1,3})\.", key))}
    if layers != set(range(len(layers))) or not layers or "fc.weight" not in given:
        raise AssistantError(
            f"{head.name!r} is no head of the family {head.family!r}: it lacks 'fc.weight' or "
            f"'layers.0' to 'layers.{max(layers, default=0)}'"
        )
    first = "layers.0.self_attn."
    needed = [first + f"{name}.weight" for name in ("q_norm", "q_proj", "k_proj")]
    needed.append("layers.0.mlp.gate_proj.weight")
    if missing := [name for name in needed if name not in given]:
        raise AssistantError(f"{head.name!r} lacks the tensor {missing[0]!r}")
    head_dim, queries, keys, inner = (given[name].shape[0] for name in needed)
    options = {key: value for key in LAYER_KEYS if (value := _look(head.config, key)) is not None}
    kinds = _look(head.config, "layer_types")
    if kinds is not None:
        if len(kinds) < len(layers):
            raise AssistantError(
                f"the config of {head.name!r} names {len(kinds)} layer_types for {len(layers)} "
                "layers"
            )
        options["layer_types"] = list(kinds)[: len(layers)]
    return Qwen3Config(
        hidden_size=given["fc.weight"].shape[0],
        intermediate_size=inner,
        num_hidden_layers=len(layers),
        num_attention_heads=queries // head_dim,
        num_key_value_heads=keys // head_dim,
        head_dim=head_dim,
        attention_bias=first + "q_proj.bias" in given,
        **options,
    )


def _expected(
    config: Qwen3Config, given: Mapping[str, Tensor], size: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the block itself."""
    with torch.device("meta"):
        layer = BlockLayer(config, 0, LayerKind(None, False)).state_dict()
    width = config.hidden_size
    num_states = max(given["fc.weight"].shape[-1] // size, 1)
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, num_states * size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(config.num_hidden_layers):
        expected |= {f"layers.{index}.{name}": tuple(t.shape) for name, t in layer.items()}
    if "embed_tokens.weight" in given:
        expected["embed_tokens.weight"] = (vocab, width)
    if (own := given.get("lm_head.weight")) is not None:
        expected["lm_head.weight"] = (own.shape[0], width)
    return expected


def _shape(head: PublishedHead, config: Qwen3Config, target: PreTrainedModel) -> BlockShape:
    what = f"the config of {head.name!r}"
    text: Any = target.config.get_text_config()
    named = {key: _look(head.config, key) for key in ("block_size", "mask_token_id")}
    from_anchor = dict(head.overrides).get("from_anchor", _look(head.config, "sample_from_anchor"))
    if from_anchor is None:
        # A checkpoint of DeepSpec may be called DFlash; its class says what its outputs mean.
        from_anchor = head.family == DSPARK
    scales = {
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": 0.0,
    }
    for name, usual in scales.items():
        value = _look(head.config, name)
        scales[name] = usual if value is None else value
        if not isinstance(scales[name], (int, float)) or not math.isfinite(scales[name]):
            raise AssistantError(f"{what} has {name}={value!r}, which is no number")
    scale = dict(head.overrides).get("embedding_scale", scales["input_embedding_scale"])
    embeddings: Any = target.get_input_embeddings()
    return BlockShape(
        whole_number(what, named, "block_size", 2, MAX_BLOCK),
        bool(from_anchor),
        whole_number(what, named, "mask_token_id", 0, embeddings.weight.shape[0] - 1),
        _hidden_layers(head, text),
        tuple(_kind(head, config, index) for index in range(config.num_hidden_layers)),
        float(scale),
        float(scales["output_multiplier"]),
        float(scales["final_logit_softcapping"]),
    )


def _hidden_layers(head: PublishedHead, text: Any) -> tuple[int, ...]:
    """The indices of hidden states that the user or the config names."""
    ids: Any = dict(head.overrides).get("aux_layers")
    shift = 0
    if ids is None:
        ids = _look(head.config, "aux_hidden_state_layer_ids")
    if ids is None:
        ids, shift = _look(head.config, "target_layer_ids"), 1
    if ids is None:
        raise AssistantError(
            f"the config of {head.name!r} has no target_layer_ids, which say what the head reads "
            "of the target; pass BlockConfig(aux_layers=[...]), the indices of the hidden states "
            "that it was trained on"
        )
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int for i in ids):
        raise AssistantError(f"{head.name!r} reads the layers {ids!r:.60}, which are no numbers")
    layers = tuple(i + shift for i in ids)
    count = head.tensors["fc.weight"].shape[1] // text.hidden_size
    if len(layers) != count or not all(0 <= i <= text.num_hidden_layers for i in layers):
        raise AssistantError(
            f"{head.name!r} is to read the hidden states {list(layers)}; it reads {count} of "
            f"{text.hidden_size} dimensions each, from 0 to {text.num_hidden_layers}"
        )
    return layers


def _kind(head: PublishedHead, config: Qwen3Config, index: int) -> LayerKind:
    """Full layers see the whole block; sliding ones look back only, unless the config differs."""
    slides = (config.layer_types or [])[index] == "sliding_attention"
    causal = _look(head.config, "is_causal")
    if causal is None:
        causal = slides and not _look(head.config, "sliding_window_non_causal")
    return LayerKind(config.sliding_window if slides else None, bool(causal))


register_family(PublishedFamily(DFLASH, STRATEGY, build_block_head))
register_family(PublishedFamily(DSPARK, STRATEGY, build_block_head))
