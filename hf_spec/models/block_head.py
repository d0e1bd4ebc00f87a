"""Heads that draft a whole block in one pass: DFlash and DSpark.

The block is the last token and then masks. Its layers read two kinds of keys and values: those of
the block itself, in which every place sees every other one, and those of the *context*, one vector
per committed token, mixed from the target's hidden states of several layers. The context is the
same for every layer, which makes keys and values of it without a norm of its own; they stay, and
those of the block are dropped (Chen et al. 2026, arXiv 2602.06036). DSpark, from deepseek-ai's
DeepSpec, adds the heads of `hf_spec.models.markov`.

Layouts that are alike and mean something else:

=====================  ===========================================================================
what an output drafts  in DFlash the token at its own place, so the first of b outputs drafts
                       nothing; in DSpark the token after its place, so b are drafted
layer ids              z-lab, SpecForge and DeepSpec count the outputs of layers from 0 (-1 is the
                       embedding); vLLM's "speculators" count hidden states
=====================  ===========================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config
from transformers.activations import ACT2FN

from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.adapters.reading import whole_number
from hf_spec.errors import AssistantError
from hf_spec.execution.attention import PackedStep, tree_attention
from hf_spec.execution.vocabulary import PADDED_ROWS
from hf_spec.models.markov import CONFIDENCE, ConfidenceHead, MarkovHead, expected_tensors
from hf_spec.models.markov import PREFIX as MARKOV
from hf_spec.models.published_weights import OutputHead, fitted, known_tokens, sizes_of

STRATEGY = "block"
DFLASH, DSPARK = "dflash", "dspark"

# Larger than any block that was published, by a factor of sixteen.
MAX_BLOCK = 256
# What the layers are told of their config; sizes and counts follow from the tensors.
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

# Cosines and sines of (T, D) positions.
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerKind:
    """What a layer lets the places of a block see: how far back, and whether not ahead."""

    window: int | None
    causal: bool


@dataclass(frozen=True)
class BlockShape:
    """What a block head is, beside its weights.

    Attributes:
        block_size: b, places of a block.
        from_anchor: whether its first output drafts, too, and each one the token after its place.
        mask_token_id: stands at all places but the first.
        hidden_layers: indices of the target's hidden states that make the context; None where the
            config does not say, which only the user can mend.
        kinds: one per layer.
        embedding_scale: factor of the target's embedding.
        output_scale, softcap: what becomes of logits, a factor and then squashing by tanh; 0 for
            none.
    """

    block_size: int
    from_anchor: bool
    mask_token_id: int
    hidden_layers: tuple[int, ...] | None
    kinds: tuple[LayerKind, ...]
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0

    @property
    def num_levels(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


class BlockHead(nn.Module):
    """A block head beside its target, from tensors of the names that all layouts share.

    Attributes:
        shape: see `BlockShape`.
        embedding: of the block's tokens: its own, or the target's.
        output: reads tokens off the outputs.
        markov, confidence: of DSpark, where it has them.
    """

    strategy = STRATEGY

    def __init__(
        self,
        shape: BlockShape,
        config: Qwen3Config,
        tensors: Mapping[str, Tensor],
        embedding: nn.Module,
        output: OutputHead,
    ):
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        self.shape = shape
        width, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.fc = nn.Linear(tensors["fc.weight"].shape[1], width, bias=False)
            self.hidden_norm = nn.RMSNorm(width, eps)
            self.layers = nn.ModuleList(
                _Layer(config, index, kind) for index, kind in enumerate(shape.kinds)
            )
            self.norm = nn.RMSNorm(width, eps)
        self.load_state_dict(tensors, strict=False, assign=True)
        self.requires_grad_(False)
        self.rotary = Qwen3RotaryEmbedding(config).to(tensors["fc.weight"].device)
        self.embedding, self.output = embedding, output
        self.markov = MarkovHead(tensors) if f"{MARKOV}markov_w1.weight" in tensors else None
        has_confidence = f"{CONFIDENCE}weight" in tensors
        self.confidence = ConfidenceHead(tensors, width) if has_confidence else None

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.fc.weight.device

    def context(self, states: Tensor) -> Tensor:
        """(T, n * H) hidden states of the target, layer beside layer -> (T, width)."""
        return self.hidden_norm(self.fc(states.to(self.device, self.dtype)))

    def rotation(self, positions: Tensor) -> Rotation:
        """Of (T,) int64 positions."""
        like = self.fc.weight[:1]
        cos, sin = self.rotary(like, positions[None])
        return cos[0], sin[0]

    def embed(self, tokens: Tensor, scale: float) -> Tensor:
        """(T,) int64 -> (T, width), raw rows of the embedding times a factor."""
        weight: Any = self.embedding.weight
        rows = F.embedding(tokens.to(weight.device), weight)
        return rows.to(self.device, self.dtype) * scale

    def forward(
        self, hidden: Tensor, rotation: Rotation, steps: Mapping[LayerKind, PackedStep]
    ) -> Tensor:
        """(T, width) embedded places of packed blocks -> (T, width) outputs, one step a kind."""
        for layer, kind in zip(self.layers, self.shape.kinds, strict=True):
            hidden = layer(hidden, rotation, steps[kind])
        return self.norm(hidden)

    def logits(self, outputs: Tensor) -> Tensor:
        """(..., width) -> (..., R) logits of the tokens that the head knows."""
        found = self.output.known(outputs) * self.shape.output_scale
        if self.shape.softcap:
            found = torch.tanh(found / self.shape.softcap) * self.shape.softcap
        return found


class _Layer(nn.Module):
    """A layer of Qwen3's kind whose keys and values also come from the context."""

    def __init__(self, config: Qwen3Config, index: int, kind: LayerKind):
        super().__init__()
        self.kind = kind
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, rotation, step, self.kind.window)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        self.layer_idx = index
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        queries = config.num_attention_heads * self.head_dim
        keys = (config.num_key_value_heads or 0) * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, width, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """(T, width) -> keys and values (H_kv, T, D) each."""
        key = self.k_norm(self._split(self.k_proj(states)))
        return _rotated(key, rotation), self._split(self.v_proj(states))

    def forward(
        self, hidden: Tensor, rotation: Rotation, step: PackedStep, window: int | None
    ) -> Tensor:
        query = _rotated(self.q_norm(self._split(self.q_proj(hidden))), rotation)
        key, value = self.keys_values(hidden, rotation)
        mixed, _ = tree_attention(
            self,
            query[None],
            key[None],
            value[None],
            None,
            scaling=self.head_dim**-0.5,
            spec_step=step,
            sliding_window=window,
        )
        return self.o_proj(mixed[0].flatten(1))

    def _split(self, states: Tensor) -> Tensor:
        return states.view(len(states), -1, self.head_dim).transpose(0, 1)


class _Mlp(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


def _rotated(states: Tensor, rotation: Rotation) -> Tensor:
    """(H, T, D) turned by the positions of its T, halves against halves."""
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def build_block_head(head: PublishedHead, target: PreTrainedModel) -> BlockHead:
    """A DFlash or DSpark head in z-lab's, SpecForge's, DeepSpec's or the speculators layout."""
    given = {key.removeprefix("logit_head."): tensor for key, tensor in head.tensors.items()}
    size, vocab = sizes_of(target)
    config = _layer_config(head, given)
    own_head = given.get("lm_head.weight")
    offsets = given.get("d2t")
    own = own_head if own_head is not None else offsets
    num_known = vocab if own is None else len(own)
    if offsets is None and num_known > vocab:
        # Rows that pad the published vocabulary.
        for name in ("lm_head.weight", f"{MARKOV}markov_w2.weight"):
            if name in given and len(given[name]) <= vocab + PADDED_ROWS:
                given[name] = given[name][:vocab]
        num_known = len(given["lm_head.weight"])
    vocabulary = known_tokens(repr(head.name), offsets, num_known, vocab)
    expected = _expected(config, given, size, vocab)
    expected |= expected_tensors(given, config.hidden_size, num_known, vocab)
    tensors = fitted(
        head, {k: t for k, t in given.items() if k not in ("d2t", "t2d")}, expected, target
    )
    embedding: Any = target.get_input_embeddings()
    if "embed_tokens.weight" in tensors:
        embedding = nn.Embedding.from_pretrained(tensors["embed_tokens.weight"])
    lacking = [
        name
        for name in ("embed_tokens.weight", "lm_head.weight")
        if name not in tensors and config.hidden_size != size
    ]
    if lacking:
        raise AssistantError(
            f"{head.name!r} is {config.hidden_size} wide and has no {lacking[0]!r}, and the "
            f"target's is {size} wide"
        )
    output = OutputHead(target, tensors.get("lm_head.weight"), vocabulary)
    return BlockHead(_shape(head, config, target), config, tensors, embedding, output).eval()


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
        layer = _Layer(config, 0, LayerKind(None, False)).state_dict()
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
    from_anchor = _look(head.config, "sample_from_anchor")
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
    embeddings: Any = target.get_input_embeddings()
    return BlockShape(
        whole_number(what, named, "block_size", 2, MAX_BLOCK),
        bool(from_anchor),
        whole_number(what, named, "mask_token_id", 0, embeddings.weight.shape[0] - 1),
        _hidden_layers(head, config, text),
        tuple(_kind(head, config, index) for index in range(config.num_hidden_layers)),
        float(scales["input_embedding_scale"]),
        float(scales["output_multiplier"]),
        float(scales["final_logit_softcapping"]),
    )


def _hidden_layers(head: PublishedHead, config: Qwen3Config, text: Any) -> tuple[int, ...] | None:
    """The indices of hidden states that a config names; None where it names none."""
    ids, shift = _look(head.config, "aux_hidden_state_layer_ids"), 0
    if ids is None:
        ids, shift = _look(head.config, "target_layer_ids"), 1
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise AssistantError(f"the config of {head.name!r} names the layers {ids!r:.60}")
    return checked_layers(
        f"the config of {head.name!r}",
        tuple(i + shift for i in ids),
        head.tensors["fc.weight"].shape[1],
        text,
    )


def checked_layers(what: str, layers: tuple[int, ...], width: int, text: Any) -> tuple[int, ...]:
    """Hidden states, `width` wide in all, that a head reads; refused if they cannot be these."""
    count = width // text.hidden_size
    if len(layers) != count or not all(0 <= i <= text.num_hidden_layers for i in layers):
        raise AssistantError(
            f"{what} names the hidden states {list(layers)}; the head reads {count} of "
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
