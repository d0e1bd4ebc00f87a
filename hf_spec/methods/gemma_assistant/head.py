"""Network of Gemma 4's assistants: layers with queries only, over the target's keys and values.

With E the target's (scaled) embedding, t the last token and s the state of its parent::

    x      = pre_projection([E[t]; s]);  y = norm(layers(x))
    logits = y @ embed_tokens.T, or only for the tokens of the best groups (`centroids`)
    next s = post_projection(y)

Each layer attends to the target's last full-attention or last sliding-window layer that stores keys
and values. All nodes have the position of the root. Sizes and counts come from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hf_spec_kernels import Scoring
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.adapters.reading import check_tensors
from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.engine.forward.step import PackedStep, storing_layers
from hf_spec.engine.forward.tree_attention import attend_stored
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings

FAMILY = "gemma4_assistant"
STRATEGY = "gemma_assistant"
ORDERING = "token_ordering"
# Rotary parameters of text configs that have none.
DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


class GemmaAssistant(nn.Module):
    """Assistant for `target`, which is not changed, built from its config and tensors.

    With centroids, `num_best_groups` groups of tokens get logits.
    """

    strategy = STRATEGY
    token_ordering: Tensor

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: PreTrainedModel
    ):
        super().__init__()
        self.base = BaseModel.of(target)
        text: Mapping[str, Any] = config["text_config"]
        vocab_size, width = tensors["embed_tokens.weight"].shape
        self.hidden_size = tensors["post_projection.weight"].shape[0]
        eps = float(text.get("rms_norm_eps", 1e-6))
        kinds = _kinds(text, sum(name.endswith(".q_proj.weight") for name in tensors))
        layers = storing_layers(target.config.get_text_config())
        with torch.device("meta"):
            self.pre_projection = nn.Linear(2 * self.hidden_size, width, bias=False)
            self.post_projection = nn.Linear(width, self.hidden_size, bias=False)
            self.embed_tokens = nn.Embedding(vocab_size, width)
            self.norm = nn.RMSNorm(width, eps)
            self.layers = nn.ModuleList(
                _Layer(text, tensors, index, kind, layers[kind]) for index, kind in enumerate(kinds)
            )
            self.centroids: nn.Linear | None = None
            if ORDERING in tensors:
                groups = tensors["centroids.weight"].shape[0]
                self.centroids = nn.Linear(width, groups, bias=False)
        self.register_buffer(ORDERING, None)
        self.num_best_groups = int(config.get("centroid_intermediate_top_k", 32))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and activations."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, step: PackedStep
    ) -> tuple[Tensor, Tensor]:
        """Return the (T, V) logits after T nodes and their (T, H) states, from one step.

        The inputs are the target's (T, H) embeddings and (T,) positions, the (T, H) states of the
        parents, and the slots of the target's KV pool that each node attends to. Logits of tokens
        outside the best groups are -inf.
        """
        weight = self.pre_projection.weight
        hidden = self.pre_projection(torch.cat([embedded, states], dim=-1).to(weight))
        for layer in self.layers:
            hidden = layer(hidden, positions, step)
        hidden = self.norm(hidden)
        return self._logits(hidden), self.post_projection(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        table = self.embed_tokens.weight
        if self.centroids is None:
            return hidden @ table.T
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        best = self.centroids(hidden).topk(min(self.num_best_groups, len(groups)), dim=-1).indices
        tokens = groups[best].flatten(1)
        few = (table[tokens] @ hidden[..., None])[..., 0]
        logits = few.new_full((len(hidden), len(table)), float("-inf"))
        return logits.scatter_(-1, tokens, few)


class _Layer(nn.Module):
    """Layer of `kind` that attends to the keys and values of `layer` of the target."""

    frequencies: Tensor

    def __init__(
        self,
        text: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        index: int,
        kind: str,
        layer: int,
    ):
        super().__init__()
        eps, self.layer = float(text.get("rms_norm_eps", 1e-6)), layer
        queries, self.head_size = (
            tensors[f"layers.{index}.{name}.weight"].shape[0] for name in ("q_proj", "q_norm")
        )
        width, attended = tensors[f"layers.{index}.o_proj.weight"].shape
        inner = tensors[f"layers.{index}.gate_proj.weight"].shape[0]
        self.num_heads = queries // self.head_size
        sliding = kind == "sliding_attention"
        # transformers attends to the window and one more stored token. One is added for the root,
        # whose position all nodes have, since it is not stored.
        self.window = int(text["sliding_window"]) + 2 if sliding else None
        rope = {**DEFAULT_ROPE.get(kind, {}), **(text.get("rope_parameters") or {}).get(kind, {})}
        frequencies = inverse_frequencies(rope, self.head_size)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.o_proj = nn.Linear(attended, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_size, eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.activation = ACT2FN[text.get("hidden_activation", "gelu_pytorch_tanh")]

    def forward(self, hidden: Tensor, positions: Tensor, step: PackedStep) -> Tensor:
        """(T, width) -> (T, width)."""
        mixed = self._attend(self.input_layernorm(hidden), positions, step)
        hidden = hidden + self.post_attention_layernorm(self.o_proj(mixed))
        inner = self.pre_feedforward_layernorm(hidden)
        inner = self.down_proj(self.activation(self.gate_proj(inner)) * self.up_proj(inner))
        return (hidden + self.post_feedforward_layernorm(inner)) * self.layer_scalar

    def _attend(self, hidden: Tensor, positions: Tensor, step: PackedStep) -> Tensor:
        queries = self.q_norm(self.q_proj(hidden).view(-1, self.num_heads, self.head_size))
        angles = positions[:, None].float() * self.frequencies
        queries = _rotated(queries, angles[:, None]).transpose(0, 1)[None]
        keys, values = step.pool.keys[self.layer], step.pool.values[self.layer]
        scoring = Scoring(scale=1.0, window=self.window)
        mixed = attend_stored(step, queries.to(keys), keys, values, scoring)
        return mixed[0].flatten(1).to(hidden)


def inverse_frequencies(rope: Mapping[str, Any], head_size: int) -> Tensor:
    """Return (D / 2,) angles per position; "proportional" leaves the last dimensions unrotated."""
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        raise AssistantError(
            f"rope_type={kind!r} is not supported for Gemma 4's assistants; they have 'default' or "
            "'proportional'"
        )
    share = rope.get("partial_rotary_factor", 1.0) if kind == "proportional" else 1.0
    turning = int(share * head_size // 2)
    powers = torch.arange(turning, dtype=torch.float, device="cpu") * 2 / head_size
    slow = torch.zeros(head_size // 2 - turning, device="cpu")
    return torch.cat([rope["rope_theta"] ** -powers / rope.get("factor", 1.0), slow])


def _rotated(queries: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embeddings to (T, heads, D) queries; pairs are (d, d + D / 2)."""
    cos, sin = angles.cos().to(queries), angles.sin().to(queries)
    first, second = queries.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """Return the attention type of each of `count` layers; `AssistantError` if they differ."""
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise AssistantError(
            f"text_config has layer_types={kinds!r}, but the weights are of {count} layers"
        )
    return [str(kind) for kind in kinds]


def build(head: PublishedHead, target: PreTrainedModel) -> GemmaAssistant:
    """Return the assistant of published files, in the dtype and on the device of `target`."""
    tensors = {_canonical_name(name): tensor for name, tensor in head.tensors.items()}
    # The output head is tied to the embedding; some files store it twice.
    tensors.pop("lm_head.weight", None)
    _check_target(head, tensors, target)
    assistant = GemmaAssistant(head.config, tensors, target)
    ordering = tensors.pop(ORDERING, None)
    if assistant.centroids is not None:
        assistant.token_ordering = _ordering(head.name, ordering, assistant)
    expected = {name: weight.shape for name, weight in assistant.named_parameters()}
    check_tensors(f"the assistant {head.name!r}", tensors, expected)
    _check_key_sizes(head.name, assistant, target)
    weights = {name: t.to(target.device, target.dtype) for name, t in tensors.items()}
    assistant.load_state_dict(weights, strict=False, assign=True)
    assistant.to(target.device)
    return assistant.requires_grad_(False).eval()


def _canonical_name(name: str) -> str:
    for part in ("model.", "masked_embedding."):
        name = name.removeprefix(part)
    return name.replace(".self_attn.", ".").replace(".mlp.", ".")


def _ordering(name: str, stored: Tensor | None, assistant: GemmaAssistant) -> Tensor:
    """Return the (V,) int64 token ids, group by group; each must occur once."""
    size = assistant.embed_tokens.num_embeddings
    tokens = torch.empty(0) if stored is None else stored.flatten().long()
    centroids: Any = assistant.centroids
    whole = size % centroids.out_features == 0 and len(tokens) == size
    if not whole or not torch.equal(tokens.sort().values, torch.arange(size)):
        raise AssistantError(
            f"the assistant {name!r} is damaged: its token_ordering does not divide {size} tokens "
            f"into {centroids.out_features} groups"
        )
    return tokens


def _check_target(
    head: PublishedHead, tensors: Mapping[str, Tensor], target: PreTrainedModel
) -> None:
    """Check that hidden size, vocabulary and layer types fit the target."""
    config: Any = target.config.get_text_config()
    what, name = f"the assistant {head.name!r}", type(target).__name__
    width = tensors["post_projection.weight"].shape[0]
    if width != config.hidden_size:
        raise AssistantError(
            f"{what} is for targets of hidden size {width}, but that of {name} is "
            f"{config.hidden_size}; use the assistant published for this model"
        )
    sizes = tensors["embed_tokens.weight"].shape[0], num_embeddings(target)
    if abs(sizes[0] - sizes[1]) > PADDED_ROWS:
        raise AssistantError(
            f"{what} has {sizes[0]} tokens, but {name} has {sizes[1]}; use the assistant published "
            "for this model"
        )
    text = head.config.get("text_config")
    stored = storing_layers(config)
    wanted = set(text.get("layer_types") or ()) if isinstance(text, dict) else set()
    if lacking := sorted(wanted - set(stored)):
        raise UnsupportedError(
            f"{what} attends to layers of type {', '.join(lacking)}, but the layers of {name} that "
            f"store keys are of type {', '.join(sorted(stored))}; use spec_strategy='lookup'"
        )


def _check_key_sizes(name: str, assistant: GemmaAssistant, target: PreTrainedModel) -> None:
    """Check that queries fit the target's keys, where its attention modules show their sizes."""
    layers: Any = assistant.layers
    # The decoder only: a vision tower has layer indices of its own.
    for module in target.get_decoder().modules():
        projection: Any = getattr(module, "k_proj", None)
        size: Any = getattr(module, "head_dim", None)
        for layer in layers if projection is not None and size is not None else ():
            count = projection.out_features // size
            fits = size == layer.head_size and layer.num_heads % count == 0
            if getattr(module, "layer_idx", None) == layer.layer and not fits:
                raise AssistantError(
                    f"assistant {name!r} has {layer.num_heads} query heads of size "
                    f"{layer.head_size}, but layer {layer.layer} of {type(target).__name__} has "
                    f"{count} of size {size}; use the assistant published for this model"
                )


register_family(PublishedFamily(FAMILY, STRATEGY, build))
