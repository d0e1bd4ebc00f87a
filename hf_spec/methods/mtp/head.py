"""Multi-token prediction: the layer that some models carry to predict the token after next.

A module joins the embedding of a token with the target's last state before it, by two norms and a
projection, and has one decoder layer of the target's own kind with keys and values of its own; the
target's head reads tokens off it (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2). It was trained
for one token, and drafts several by being fed what it said itself. The weights are those of the
target's own files, or of a folder that the package speculators wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.hub import Place
from hf_spec.adapters.published import (
    INDEX,
    PublishedFamily,
    PublishedHead,
    read_weights,
    register_family,
)
from hf_spec.adapters.reading import check_tensors
from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.eagle.head import OwnHead
from hf_spec.methods.feature_pairs.rows import MaskTokens, State
from hf_spec.methods.feature_pairs.runner import check_packed
from hf_spec.methods.mtp.layouts import LAYER, PARTS, Layout, find_module, own_names

FAMILY = "mtp"
STRATEGY = "mtp"


@dataclass(frozen=True)
class MtpShape:
    """Blocks of one pair, one layer, and nothing carried from pair to pair."""

    block_size: int = 1
    num_layers: int = 1
    recurrent: bool = False


class MtpHead(nn.Module):
    """The MTP module of `tensors`, under the names of `mtp_layouts`, for `target`.

    Attributes:
        base: the target that it is for.
        hidden_layers: the target's last state is all that it reads.
        attention: its layer, as a model of the target's class.
        head: reads tokens off what it says.
    """

    strategy = STRATEGY
    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(
        self, what: str, layout: Layout, tensors: Mapping[str, Tensor], target: PreTrainedModel
    ):
        super().__init__()
        self.base = BaseModel.of(target)
        self.layout = layout
        self.shape = MtpShape()
        self.attention: Any = _one_layer(what, tensors, target)
        self.hidden_size: int = self.attention.config.hidden_size
        norm = self.attention.norm
        if layout.hands_on_raw:
            self.attention.norm = nn.Identity()
        size = self.hidden_size
        self.joined = nn.ModuleDict(
            {
                # Of the target's class: some count weights from one.
                "embedding_norm": copy.deepcopy(norm),
                "feature_norm": copy.deepcopy(norm),
                "projection": nn.Linear(2 * size, size, bias=False, dtype=target.dtype),
            }
        ).to(target.device)
        _load(what, self.joined, tensors)
        # The target's, and no part of this module.
        self._shared = [target.get_input_embeddings()]
        reads = norm if layout.hands_on_raw else nn.Identity()
        self.head = OwnHead(reads, target.get_output_embeddings(), None, num_embeddings(target))
        # Not `self`, which has the target's head.
        for mine in (self.attention, self.joined, norm):
            mine.requires_grad_(False).eval()

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Features (T, H): the target's last states as they are."""
        projection: Any = self.joined["projection"]
        return states[0].to(projection.weight.device, projection.weight.dtype)

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, None]:
        """(S, L) int64 t_{i+1} and (S, L, H) features -> (S, L, 2H), embedding and feature."""
        embedded: Tensor = self._shared[0](tokens)
        return torch.cat([embedded.to(features), features], dim=-1), None

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """(B, T, 2H) from `mix` -> (B, T, H); `attention` is what the layer takes."""
        embedded, features = mixed.chunk(2, dim=-1)
        if self.layout.hides_first:
            first = attention["position_ids"] == 0
            embedded = embedded.masked_fill(first[..., None], 0.0)
        parts = [self.joined["embedding_norm"](embedded), self.joined["feature_norm"](features)]
        joined = torch.cat(parts[::-1] if self.layout.features_first else parts, dim=-1)
        hidden = self.joined["projection"](joined)
        return self.attention(inputs_embeds=hidden, use_cache=False, **attention)[0]

    def mask_tokens(self, count: int) -> MaskTokens | None:
        """None: every token takes a step."""
        return None


def own_head(target: PreTrainedModel) -> MtpHead:
    """The head of the MTP module in the files that `target` was loaded from.

    Raises:
        AssistantError: if there are none, or they have none.
        UnsupportedError: if its layer cannot be run.
    """
    name = target.name_or_path
    if not name:
        raise AssistantError(
            f"this {type(target).__name__} was not loaded from files, so there are none with an "
            "MTP module; load it by from_pretrained(), or pass assistant=<folder or Hub id>"
        )
    folder = Path(name)
    if not folder.is_dir():
        revision = getattr(target.config, "_commit_hash", None)
        folder = Place(name, revision).fetch((INDEX, "*.safetensors"))
    return _head(f"the MTP module of {name!r}", folder, target)


def build(head: PublishedHead, target: PreTrainedModel) -> MtpHead:
    """The head of a folder of the package speculators."""
    return _head(f"the MTP module {head.name!r}", head.tensors, target)


def _head(what: str, source: Path | Mapping[str, Tensor], target: PreTrainedModel) -> MtpHead:
    """From tensors, or the folder that has them among others, which are not read."""
    known = stored_names(source) if isinstance(source, Path) else set(source)
    found = find_module(known, target.config.get_text_config().num_hidden_layers)
    if found is None:
        raise AssistantError(
            f"{what} is not there: no tensor is one of an MTP module (model.layers.N.eh_proj, "
            "mtp.fc, mtp_layers.0.input_proj); use spec_strategy='lookup', or a drafter of its own"
        )
    names = own_names(known, *found)
    if isinstance(source, Path):
        source = read_weights(source, str(source), names.__contains__)
    tensors = {names[name]: tensor for name, tensor in source.items() if name in names}
    return MtpHead(what, found[0], tensors, target)


def stored_names(folder: Path) -> set[str]:
    """The names of all tensors of a folder; none of them is read."""
    names: set[str] = set()

    def note(name: str) -> bool:
        names.add(name)
        return False

    read_weights(folder, str(folder), note)
    return names


def _one_layer(what: str, tensors: Mapping[str, Tensor], target: PreTrainedModel) -> Any:
    """A model of the target's class with the module's layer and norm, on the target's device."""
    decoder: Any = target.get_decoder()
    if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
        raise UnsupportedError(
            f"{type(decoder).__name__} is not made of layers and a norm after them, so it has no "
            "MTP module; use spec_strategy='draft' or 'lookup'"
        )
    check_packed(decoder)
    weights = {
        f"layers.0.{name.removeprefix(LAYER)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(LAYER)
    }
    config = _config(decoder.config, experts=any(".experts." in name for name in weights))
    weights["norm.weight"] = tensors["norm.weight"]
    weights["embed_tokens.weight"] = torch.zeros(1, config.hidden_size)
    # It knows how experts, and whatever else is stored in another form, become weights.
    stack, info = type(decoder).from_pretrained(
        None, config=config, state_dict=weights, dtype=target.dtype, output_loading_info=True
    )
    wrong = [f"{key} {sorted(map(str, info[key]))}" for key in info if info[key]]
    if wrong:
        raise AssistantError(
            f"{what} does not fit a layer of {type(decoder).__name__}, maybe because it is stored "
            f"quantised: {'; '.join(wrong)}"[:500]
        )
    return stack.to(target.device).eval()


def _config(plain: Any, experts: bool) -> Any:
    """The config of one layer that attends to all tokens, with experts or without."""
    config = copy.deepcopy(plain)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": list(getattr(plain, "mtp_layer_types", None) or ["full_attention"])[:1],
        "mlp_layer_types": ["sparse" if experts else "dense"],
        "first_k_dense_replace": 0 if experts else 1,
        "mlp_only_layers": [] if experts else [0],
        "decoder_sparse_step": 1,
        "vocab_size": 1,
        "pad_token_id": None,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _load(what: str, joined: nn.ModuleDict, tensors: Mapping[str, Tensor]) -> None:
    own = {name: t for name, t in tensors.items() if name.partition(".")[0] in PARTS[:3]}
    check_tensors(what, own, {name: weight.shape for name, weight in joined.named_parameters()})
    joined.load_state_dict(own)


register_family(PublishedFamily(FAMILY, STRATEGY, build))
