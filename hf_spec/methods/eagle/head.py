"""Published EAGLE heads: one layer that predicts the target's next feature from the last one.

A pair i is the token t_{i+1} with a feature of position i. EAGLE-3 (Li et al. 2025, arXiv
2503.01840, section 3.1) makes the feature from states of a low, a middle and a high layer of the
target, and its layer attends over embedding and feature side by side; a drafted token brings the
head's own output in place of a feature. EAGLE-1 and 2 (Li et al. 2024, arXiv 2401.15077 and
2406.16858) take the target's last state, joined with the embedding before an ordinary layer, and
the target's own head. EAGLE-3.1 adds norms before and after; P-EAGLE drafts all tokens in one
pass, with a learned feature and a mask token for those to come.

The layers are transformers' own, with projections of another width; they run in the target's
dtype, but bfloat16 for float16, in which the features of some targets overflow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, PreTrainedModel, Qwen3Config, Qwen3Model

from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.base_name import base_name, is_hub_id
from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.adapters.reading import check_tensors
from hf_spec.backend.device.placement import weight_rows
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.methods.eagle.spec import EagleSpec, layer_config, normal_names, read_spec
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead
from hf_spec.methods.feature_pairs.rows import MaskTokens, State
from hf_spec.methods.published_weights import head_dtype, known_tokens

logger = logging.getLogger(__name__)

STRATEGY = "eagle"
FAMILIES = ("eagle3", "peagle", "eagle")


@dataclass(frozen=True)
class EagleShape:
    """Blocks of one pair, and no state that is carried; see `PairHead`."""

    num_layers: int
    block_size: int = 1
    recurrent: bool = False


class OwnHead(FewTokensHead):
    """A trained norm and head over R tokens of the target's V, `vocabulary` (None for all)."""

    def __init__(self, norm: Any, scores: Any, vocabulary: Tensor | None, full_size: int):
        nn.Module.__init__(self)
        self.norm = norm
        self.scores = scores
        self.full_size = full_size
        self.size = scores.weight.shape[0]
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """(..., h) -> (..., R), the logits of the vocabulary alone."""
        normed = self.norm(hidden)
        return self.scores(normed.to(self.scores.weight.dtype))


class EagleHead(nn.Module):
    """An EAGLE-3 head of `spec` with its own `tensors`, for `target`, which is not changed.

    Attributes:
        base: the target that it is for.
        spec: what it is.
        hidden_layers: indices of the target's states that make a feature.
        attention: its layers, as a model of transformers.
        head: reads tokens off features.
    """

    strategy = STRATEGY

    def __init__(self, spec: EagleSpec, tensors: dict[str, Tensor], target: PreTrainedModel):
        super().__init__()
        self.base = BaseModel.of(target)
        self.spec = spec
        self.shape = EagleShape(spec.num_layers)
        self.hidden_size = spec.hidden_size
        self.hidden_layers = spec.hidden_layers
        dtype = head_dtype(target)
        tensors = dict(tensors)
        own = {name: tensors.pop(name, None) for name in ("d2t", "embed_tokens.weight")}
        mask = tensors.pop("mask_hidden", None)
        self.attention: Any = _stack(spec, tensors)
        self._widen(self.attention, tensors)
        _load(spec.what, self.attention, tensors, target.device, dtype)
        self._table = self._embedding(own["embed_tokens.weight"], target, dtype)
        self._scale = spec.hidden_size**0.5 if spec.embedding == "scaled" else 1.0
        self.head = self._reader(own["d2t"], target)
        # Modules of the target, which may be among its own, stay as they are.
        self.attention.requires_grad_(False).eval()
        self._mask = self._mask_feature(mask, target.device, dtype)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Features (T, h) of the target's states (T, H) of `hidden_layers`."""
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
        """(S, L) int64 t_{i+1} and (S, L, h) features -> (S, L, 2h), embedding and feature."""
        embedded = F.embedding(tokens, self._table) * self._scale
        return torch.cat([embedded.to(features.dtype), features], dim=-1), None

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """(B, T, 2h) from `mix` -> (B, T, h); `attention` is what the layers take."""
        stack = self.attention
        first, *others = stack.layers
        entered, residual = self._enter(mixed)
        attention["position_embeddings"] = stack.rotary_emb(residual, attention["position_ids"])
        hidden = residual + first.self_attn(hidden_states=entered, **attention)[0]
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in others:
            hidden = layer(hidden, **attention)
        return stack.norm(hidden) if self.spec.norm_output else hidden

    def mask_tokens(self, count: int) -> MaskTokens | None:
        """What stands for so many tokens to come in one pass; None where steps draft them."""
        if self._mask is None or self.spec.mask_token is None:
            return None
        return MaskTokens(self.spec.mask_token, self._mask.expand(count, -1))

    def _enter(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer attends over, and its residual."""
        first = self.attention.layers[0]
        embedded, feature = mixed.chunk(2, dim=-1)
        normed = first.hidden_norm(feature)
        residual = normed if self.spec.norm_before_residual else feature
        return torch.cat([first.input_layernorm(embedded), normed], dim=-1), residual

    def _widen(self, stack: Any, tensors: dict[str, Tensor]) -> None:
        """Give the model of one ordinary layer what is EAGLE-3's; by the names of its tensors."""
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

    def _reader(self, offsets: Tensor | None, target: PreTrainedModel) -> FewTokensHead:
        stack, full_size = self.attention, num_embeddings(target)
        # The feature is normed already where that is handed on.
        norm = nn.Identity() if self.spec.norm_output else stack.norm
        own = getattr(stack, "lm_head", None)
        scores: Any = _head_of(self.spec, target) if own is None else own
        num_known = scores.weight.shape[0]
        vocabulary = known_tokens(self.spec.what, offsets, num_known, full_size)
        if own is not None and num_known > full_size:
            # Rows that pad the published vocabulary.
            scores.weight = nn.Parameter(scores.weight[:full_size], requires_grad=False)
        if vocabulary is not None:
            vocabulary = vocabulary.to(scores.weight.device)
        return OwnHead(norm, scores, vocabulary, full_size)

    def _embedding(self, own: Tensor | None, target: PreTrainedModel, dtype: torch.dtype) -> Tensor:
        """(V, h) the rows that tokens are given."""
        if self.spec.embedding != "own":
            table = weight_rows(target.get_input_embeddings())
            if table.shape[1] != self.hidden_size:
                raise AssistantError(
                    f"{self.spec.what} reads embeddings of {self.hidden_size} numbers, and the "
                    f"target's have {table.shape[1]}"
                )
            return table
        assert own is not None, "the spec says that there is one"
        size = (num_embeddings(target), self.hidden_size)
        if not own.is_floating_point():
            raise AssistantError(f"{self.spec.what} is damaged: its embedding is of {own.dtype}")
        if own.ndim != 2 or own.shape[1] != size[1] or abs(own.shape[0] - size[0]) > PADDED_ROWS:
            raise AssistantError(
                f"{self.spec.what} is for another target: its embedding is {tuple(own.shape)}, "
                f"and {size} is needed"
            )
        missing = max(0, size[0] - len(own))
        return F.pad(own, (0, 0, 0, missing)).to(target.device, dtype)

    def _mask_feature(
        self, mask: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> Tensor | None:
        if self.spec.mask_token is None:
            return None
        width = self.attention.fc.in_features
        if mask is None or mask.numel() != width or self.spec.mask_token >= len(self._table):
            raise AssistantError(
                f"{self.spec.what} is damaged: mask_hidden is "
                f"{None if mask is None else tuple(mask.shape)}, not of {width} numbers, or "
                f"token {self.spec.mask_token} has no embedding"
            )
        with torch.no_grad():
            parts = mask.to(device, dtype).view(1, -1).chunk(len(self.hidden_layers), dim=-1)
            return self.fuse(parts)


class FirstEagleHead(EagleHead):
    """An EAGLE-1 or 2 head: the target's last state, joined before an ordinary layer."""

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Features (T, h): the target's last state as it is."""
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

    def _widen(self, stack: Any, tensors: dict[str, Tensor]) -> None:
        stack.layers[0].input_layernorm = nn.Identity()
        stack.norm = nn.Identity()
        with torch.device("meta"):
            stack.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, "fc.bias" in tensors)


def build(head: PublishedHead, target: PreTrainedModel) -> EagleHead:
    """The head that published files describe, in evaluation mode, on the target's device.

    Raises:
        AssistantError: if it is damaged, or for a target of other sizes.
    """
    tensors = normal_names(head.tensors)
    spec = read_spec(head, tensors, target.config.get_text_config())
    _compare_names(spec.what, head, target)
    kind = FirstEagleHead if head.family == "eagle" else EagleHead
    return kind(spec, tensors, target)


def _compare_names(what: str, head: PublishedHead, target: PreTrainedModel) -> None:
    """Warn where a head names another target: one of equal sizes shows in bad drafts alone."""
    inner = head.config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    own = base_name(target)
    if isinstance(named, str) and named != own and is_hub_id(named) and is_hub_id(own):
        logger.warning("%s was trained for %s; drafts for %s may be bad", what, named, own)


def _stack(spec: EagleSpec, tensors: dict[str, Tensor]) -> Any:
    """A model of ordinary layers of the head's sizes, without weights or an embedding."""
    sizes: dict[str, Any] = {
        **layer_config(spec, tensors),
        "rope_parameters": spec.rope,
        "vocab_size": 1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    kind = sizes.pop("model_type")
    with torch.device("meta"):
        if kind == "qwen3":
            stack: Any = Qwen3Model(Qwen3Config(**sizes))
        else:
            stack = LlamaModel(LlamaConfig(**sizes))
    del stack.embed_tokens
    return stack


def _load(
    what: str, stack: Any, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    shapes = {name: weight.shape for name, weight in stack.named_parameters()}
    for name, shape in shapes.items():
        # Some layers have biases for queries, keys and values alone.
        if name.endswith("o_proj.bias") and name not in tensors:
            tensors[name] = torch.zeros(shape)
    check_tensors(what, tensors, shapes)
    weights = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    stack.load_state_dict(weights, assign=True)
    # Its frequencies are computed, not stored.
    stack.rotary_emb = type(stack.rotary_emb)(stack.config).to(device)


def _head_of(spec: EagleSpec, target: PreTrainedModel) -> Any:
    """The target's own head, for heads without one."""
    scores: Any = target.get_output_embeddings()
    if scores.weight.shape[1] != spec.hidden_size:
        raise AssistantError(
            f"{spec.what} is damaged: it has no lm_head, and the target's reads states of size "
            f"{scores.weight.shape[1]}, not {spec.hidden_size}"
        )
    return scores


for _family in FAMILIES:
    register_family(PublishedFamily(_family, STRATEGY, build))
