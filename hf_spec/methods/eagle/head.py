"""EAGLE heads: one layer that predicts the next feature from a pair of a token and a feature.

Pair i is the token t_{i+1} with the feature g_i of position i; drafted tokens use the output of
their parent as the feature. E is the embedding, h the width of the head.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3.1)::

    g_i = fc([low; middle; high hidden state of the target at position i])
    x   = [input_layernorm(E[t_{i+1}]); hidden_norm(g_i)]
    a   = g_i + attention(x)
    y_i = a + mlp(post_attention_layernorm(a))
    logits = lm_head(norm(y_i)), over R of V tokens

EAGLE-1 and 2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): f_i is the target's last hidden
state, y_i = layer(fc([E[t_{i+1}]; f_i])), and the target's own head gives the logits.

EAGLE-3.1 adds norms before and after. P-EAGLE drafts all tokens in one pass: later tokens are pairs
of a mask token and a learned feature.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, PreTrainedModel, Qwen3Config, Qwen3Model

from hf_spec.adapters.adapter import BaseModel, base_name, is_hub_id
from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.adapters.reading import check_tensors
from hf_spec.backend.device.placement import weight_rows
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.methods.eagle.spec import EagleSpec, canonical_names, read_spec, verifier_name
from hf_spec.methods.feature_pairs.draft_head import NormedHead, PairHead, SinglePairShape, State
from hf_spec.methods.published_weights import draft_vocab_ids, head_dtype

logger = logging.getLogger(__name__)

STRATEGY = "eagle"
FAMILIES = ("eagle3", "peagle", "eagle")


class EagleHead(PairHead):
    """An EAGLE-3 head built from `spec` and `tensors` for `target`, which is not changed."""

    strategy = STRATEGY

    def __init__(self, spec: EagleSpec, tensors: dict[str, Tensor], target: PreTrainedModel):
        super().__init__()
        self.base = BaseModel.of(target)
        self.spec = spec
        self.shape = SinglePairShape(spec.layer["num_hidden_layers"])
        self.hidden_size = spec.hidden_size
        self.hidden_layers = spec.hidden_layers
        dtype = head_dtype(target)
        tensors = dict(tensors)
        offsets = tensors.pop("d2t", None)
        table = tensors.pop("embed_tokens.weight", None)
        mask = tensors.pop("mask_hidden", None)
        self.attention: Any = _layer_stack(spec)
        self._adapt_layers(self.attention, tensors)
        _load_weights(spec.what, self.attention, tensors, target.device, dtype)
        self._table = self._embedding(table, target, dtype)
        self._scale = spec.hidden_size**0.5 if spec.embedding == "scaled" else 1.0
        self.head = self._output_head(offsets, target)
        # Not on `self`, which may hold modules of the target.
        self.attention.requires_grad_(False).eval()
        if spec.mask_token is not None:
            feature = self._mask_feature(spec.mask_token, mask, target.device, dtype)
            self.mask_pair = spec.mask_token, feature

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """See `PairHead`."""
        stack = self.attention
        parts = [state.to(stack.fc.weight.device, stack.fc.weight.dtype) for state in states]
        if hasattr(stack, "fc_norm"):
            parts = [norm(part) for norm, part in zip(stack.fc_norm, parts, strict=True)]
        joined = torch.cat(parts, dim=-1)
        if hasattr(stack, "input_norm"):
            joined = stack.input_norm(joined)
        return stack.fc(joined)

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, None]:
        """(S, L) int64 t_{i+1} and (S, L, h) features -> (S, L, 2h) [embedding; feature]."""
        embedded = F.embedding(tokens, self._table) * self._scale
        return torch.cat([embedded.to(features.dtype), features], dim=-1), None

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """(B, T, 2h) from `mix` -> (B, T, h); `attention` are keyword arguments of the layers."""
        stack = self.attention
        first, *others = stack.layers
        entered, residual = self._enter(mixed)
        attention["position_embeddings"] = stack.rotary_emb(residual, attention["position_ids"])
        hidden = residual + first.self_attn(hidden_states=entered, **attention)[0]
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in others:
            hidden = layer(hidden, **attention)
        return stack.norm(hidden) if self.spec.norm_output else hidden

    def _enter(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the first attention and the residual added to its output."""
        first = self.attention.layers[0]
        embedded, feature = mixed.chunk(2, dim=-1)
        normed = first.hidden_norm(feature)
        residual = normed if self.spec.norm_before_residual else feature
        return torch.cat([first.input_layernorm(embedded), normed], dim=-1), residual

    def _adapt_layers(self, stack: Any, tensors: dict[str, Tensor]) -> None:
        """Widen the first layer's projections; add the modules that `tensors` names."""
        size, first, norm = self.hidden_size, stack.layers[0], type(stack.norm)
        eps = stack.config.rms_norm_eps
        with torch.device("meta"):
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(first.self_attn, name)
                wide = nn.Linear(2 * size, plain.out_features, bias=plain.bias is not None)
                setattr(first.self_attn, name, wide)
            first.hidden_norm = norm(size, eps)
            inputs = tensors["fc.weight"].shape[1]
            stack.fc = nn.Linear(inputs, size, bias="fc.bias" in tensors)
            if "input_norm.weight" in tensors:
                stack.input_norm = norm(inputs, eps)
            if "fc_norm.0.weight" in tensors:
                count = len(self.hidden_layers)
                stack.fc_norm = nn.ModuleList(norm(inputs // count, eps) for _ in range(count))
            if "lm_head.weight" in tensors:
                stack.lm_head = nn.Linear(size, len(tensors["lm_head.weight"]), bias=False)

    def _output_head(self, offsets: Tensor | None, target: PreTrainedModel) -> NormedHead:
        stack, full_size = self.attention, num_embeddings(target)
        # With `norm_output` the feature is normed already.
        norm = nn.Identity() if self.spec.norm_output else stack.norm
        trained = getattr(stack, "lm_head", None)
        scores: Any = target.get_output_embeddings() if trained is None else trained
        width = scores.weight.shape[1]
        if trained is None and width != self.hidden_size:
            raise AssistantError(
                f"{self.spec.what} is damaged: it has no lm_head, and the target's needs inputs of "
                f"width {width}, not {self.hidden_size}"
            )
        draft_vocab_size = scores.weight.shape[0]
        vocabulary = draft_vocab_ids(self.spec.what, offsets, draft_vocab_size, full_size)
        if trained is not None and draft_vocab_size > full_size:
            # Rows that pad the published vocabulary.
            scores.weight = nn.Parameter(scores.weight[:full_size], requires_grad=False)
        if vocabulary is not None:
            vocabulary = vocabulary.to(scores.weight.device)
        return NormedHead(norm, scores, vocabulary, full_size)

    def _embedding(
        self, shipped: Tensor | None, target: PreTrainedModel, dtype: torch.dtype
    ) -> Tensor:
        """Return the (V, h) embedding: the target's, or the `shipped` one padded to V rows."""
        if self.spec.embedding != "own":
            table = weight_rows(target.get_input_embeddings())
            if table.shape[1] != self.hidden_size:
                raise AssistantError(
                    f"{self.spec.what} needs embeddings of width {self.hidden_size}, but the "
                    f"target's have width {table.shape[1]}"
                )
            return table
        assert shipped is not None, "checked by read_spec"
        size = (num_embeddings(target), self.hidden_size)
        if not shipped.is_floating_point():
            raise AssistantError(f"{self.spec.what} is damaged: its embedding is {shipped.dtype}")
        shape = tuple(shipped.shape)
        if len(shape) != 2 or shape[1] != size[1] or abs(shape[0] - size[0]) > PADDED_ROWS:
            raise AssistantError(
                f"{self.spec.what} is for another target: its embedding is {shape}, and {size} is "
                "needed"
            )
        return F.pad(shipped, (0, 0, 0, max(0, size[0] - shape[0]))).to(target.device, dtype)

    def _mask_feature(
        self, token: int, mask: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Return the (1, h) feature of P-EAGLE's mask pairs."""
        width = self.attention.fc.in_features
        if mask is None or mask.numel() != width or token >= len(self._table):
            raise AssistantError(
                f"{self.spec.what} is damaged: mask_hidden is "
                f"{None if mask is None else tuple(mask.shape)}, not of size {width}, or "
                f"token {token} has no embedding"
            )
        with torch.no_grad():
            parts = mask.to(device, dtype).view(1, -1).chunk(len(self.hidden_layers), dim=-1)
            return self.fuse(parts)


class Eagle1Head(EagleHead):
    """An EAGLE-1 or 2 head: embedding and last hidden state are joined before an ordinary layer."""

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """See `PairHead`."""
        weight = self.attention.fc.weight
        return states[0].to(weight.device, weight.dtype)

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, None]:
        """(S, L) int64 t_{i+1} and (S, L, h) features -> (S, L, h)."""
        mixed, _ = super().mix(tokens, features)
        return self.attention.fc(mixed), None

    def _enter(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        return mixed, mixed

    def _adapt_layers(self, stack: Any, tensors: dict[str, Tensor]) -> None:
        # EAGLE-1 drops the norm before the attention and the final norm.
        stack.layers[0].input_layernorm = nn.Identity()
        stack.norm = nn.Identity()
        with torch.device("meta"):
            stack.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, "fc.bias" in tensors)


def build(head: PublishedHead, target: PreTrainedModel) -> EagleHead:
    """Return the head of published files, in evaluation mode, on the target's device."""
    tensors = canonical_names(head.tensors)
    spec = read_spec(head, tensors, target.config.get_text_config())
    _warn_of_other_target(spec.what, head, target)
    kind = Eagle1Head if head.family == "eagle" else EagleHead
    return kind(spec, tensors, target)


def _warn_of_other_target(what: str, head: PublishedHead, target: PreTrainedModel) -> None:
    """Warn if the head names another target; with equal sizes only acceptance would suffer."""
    named, used = verifier_name(head.config), base_name(target)
    if named is not None and named != used and is_hub_id(named) and is_hub_id(used):
        logger.warning(
            "%s was trained for %s; few drafts for %s may be accepted", what, named, used
        )


def _layer_stack(spec: EagleSpec) -> Any:
    """Return a model of ordinary layers of the head's sizes, without weights or embedding."""
    sizes: dict[str, Any] = {
        **spec.layer,
        "rope_parameters": spec.rope,
        "vocab_size": 1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if spec.draft_window is not None:
        # Layers of Llama have no windows of their own; hf_spec's attention reads their config.
        sizes["sliding_window"] = spec.draft_window
        sizes |= {"use_sliding_window": True, "max_window_layers": 0}
    kind = sizes.pop("model_type")
    with torch.device("meta"):
        if kind == "qwen3":
            stack: Any = Qwen3Model(Qwen3Config(**sizes))
        else:
            stack = LlamaModel(LlamaConfig(**sizes))
    del stack.embed_tokens
    return stack


def _load_weights(
    what: str, stack: Any, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    shapes = {name: weight.shape for name, weight in stack.named_parameters()}
    for name, shape in shapes.items():
        # Qwen2-type layers have biases for queries, keys and values only.
        if name.endswith("o_proj.bias") and name not in tensors:
            tensors[name] = torch.zeros(shape)
    check_tensors(what, tensors, shapes)
    weights = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    stack.load_state_dict(weights, assign=True)
    # Rotary frequencies are computed, not stored.
    stack.rotary_emb = type(stack.rotary_emb)(stack.config).to(device)


for _family in FAMILIES:
    register_family(PublishedFamily(_family, STRATEGY, build))
