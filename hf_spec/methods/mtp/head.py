"""MTP module as a draft head: two norms, a projection and one decoder layer of the target's class.

With E the target's embedding and f_i its last hidden state at position i (DeepSeek-AI 2024, arXiv
2412.19437, section 2.2)::

    y_i    = layer(projection([embedding_norm(E[t_{i+1}]); feature_norm(f_i)]))
    logits = target_head(norm(y_i)), for the token after t_{i+1}

A draft step replaces f_i by y_i or norm(y_i), as the model family does (`LAYOUTS`). The weights
come from the target's own files, or from a folder that the package speculators wrote. The names of
tensors alone identify a layout; its switches follow vLLM and the models' own code. Published models
have one module, a few have several; the first is used.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.hub import HubRepo
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
from hf_spec.methods.feature_pairs.draft_head import NormedHead, PairHead, State
from hf_spec.methods.feature_pairs.runner import check_packed

FAMILY = STRATEGY = "mtp"
# Copies of the target's own embedding and head.
COPIES = ("embed_tokens.", "shared_head.head.")
# Canonical names of the modules beside the layer, in the order of `Layout.parts`.
PARTS = ("embedding_norm", "feature_norm", "projection", "norm")
LAYER = "layer."


@dataclass(frozen=True)
class Layout:
    """Tensor names and switches of a family's modules.

    Attributes:
        prefix: pattern of the start of the names; group 1 is the layer number, if there is one.
        layer: what follows in the names of the decoder layer.
        parts: names of the norms of embedding and feature, the projection, and the output norm.
        features_first: the projection reads [feature; embedding].
        zeroes_first_embedding: the embedding at position 0 is zero.
        recycles_raw_output: the next step reads the layer's output, not the normed one.
        example: a prefix that the pattern matches, with {} for the layer number.
    """

    prefix: str
    layer: str
    parts: tuple[str, str, str, str]
    features_first: bool = False
    zeroes_first_embedding: bool = False
    recycles_raw_output: bool = False
    example: str = ""

    @property
    def switches(self) -> tuple[bool, bool, bool]:
        """Switches of the network, by which layouts differ."""
        return self.features_first, self.zeroes_first_embedding, self.recycles_raw_output


LAYERNORMS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
# The package speculators.
SPECULATORS = Layout(r"mtp_layers\.0\.", "", LAYERNORMS, example="mtp_layers.0.")
LAYOUTS = (
    # DeepSeek-V3, GLM-4.5, Kimi-K2: numbered after the model's last layer.
    Layout(
        r"(?:model\.|language_model\.)*layers\.(\d+)\.",
        "",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        zeroes_first_embedding=True,
        recycles_raw_output=True,
        example="model.layers.{}.",
    ),
    # Qwen3-Next, Qwen3.5 and 3.6, Mellum.
    Layout(r"mtp\.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    # MiMo.
    Layout(
        r"model\.mtp_layers\.0\.",
        "",
        LAYERNORMS,
        features_first=True,
        zeroes_first_embedding=True,
        example="model.mtp_layers.0.",
    ),
    SPECULATORS,
)


class MtpHead(PairHead):
    """MTP module built from `tensors`, renamed by `canonical_names`, for `target`."""

    strategy = STRATEGY

    def __init__(
        self, what: str, layout: Layout, tensors: Mapping[str, Tensor], target: PreTrainedModel
    ):
        super().__init__()
        self.base = BaseModel.of(target)
        self.layout = layout
        self.attention: Any = _one_layer(what, tensors, target)
        self.hidden_size: int = self.attention.config.hidden_size
        norm = self.attention.norm
        if layout.recycles_raw_output:
            self.attention.norm = nn.Identity()
        size = self.hidden_size
        self.joined = nn.ModuleDict(
            {
                # The target's class: some store norm weights as offsets from one.
                "embedding_norm": copy.deepcopy(norm),
                "feature_norm": copy.deepcopy(norm),
                "projection": nn.Linear(2 * size, size, bias=False, dtype=target.dtype),
            }
        ).to(target.device)
        weights = {n: t for n, t in tensors.items() if n.partition(".")[0] in self.joined}
        check_tensors(what, weights, {n: w.shape for n, w in self.joined.named_parameters()})
        self.joined.load_state_dict(weights)
        # In a list, so that the target's embedding is not registered as a submodule.
        self._shared = [target.get_input_embeddings()]
        # In a list, so that it is not registered twice.
        self._output_norm = [norm]
        output_norm = norm if layout.recycles_raw_output else nn.Identity()
        scores = target.get_output_embeddings()
        self.head = NormedHead(output_norm, scores, None, num_embeddings(target))
        # Not on `self`, which holds the target's output head.
        for module in (self.attention, self.joined, norm):
            module.requires_grad_(False).eval()

    @property
    def output_norm(self) -> Any:
        """The norm before the target's output head."""
        return self._output_norm[0]

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """See `PairHead`."""
        projection: Any = self.joined["projection"]
        return states[0].to(projection.weight.device, projection.weight.dtype)

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, None]:
        """(S, L) int64 t_{i+1} and (S, L, H) features -> (S, L, 2H) [embedding; feature]."""
        embedded: Tensor = self._shared[0](tokens)
        return torch.cat([embedded.to(features), features], dim=-1), None

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """See `PairHead`."""
        embedded, features = mixed.chunk(2, dim=-1)
        if self.layout.zeroes_first_embedding:
            first = attention["position_ids"] == 0
            embedded = embedded.masked_fill(first[..., None], 0.0)
        parts = [self.joined["embedding_norm"](embedded), self.joined["feature_norm"](features)]
        joined = torch.cat(parts[::-1] if self.layout.features_first else parts, dim=-1)
        hidden = self.joined["projection"](joined)
        return self.attention(inputs_embeds=hidden, use_cache=False, **attention)[0]


def head_of_target_files(target: PreTrainedModel) -> MtpHead:
    """Return the MTP module in the files that `target` was loaded from."""
    name = target.name_or_path
    if not name:
        raise AssistantError(
            f"this {type(target).__name__} was not loaded from files, so it has no MTP module; "
            "load it with from_pretrained(), or pass assistant=<folder or Hub id>"
        )
    folder = Path(name)
    if not folder.is_dir():
        revision = getattr(target.config, "_commit_hash", None)
        folder = HubRepo(name, revision).fetch((INDEX, "*.safetensors"))
    return build_from(f"the MTP module of {name!r}", folder, target)


def build(head: PublishedHead, target: PreTrainedModel) -> MtpHead:
    """Return the MTP module of a folder that the package speculators wrote."""
    return build_from(f"the MTP module {head.name!r}", head.tensors, target)


def build_from(what: str, source: Path | Mapping[str, Tensor], target: PreTrainedModel) -> MtpHead:
    """Build the module from tensors, or from a folder of which only its tensors are read."""
    stored = _tensor_names(source) if isinstance(source, Path) else set(source)
    module = find_module(stored, target.config.get_text_config().num_hidden_layers)
    if module is None:
        raise AssistantError(
            f"{what} does not exist: no tensor belongs to an MTP module (model.layers.N.eh_proj, "
            "mtp.fc, mtp_layers.0.input_proj); use spec_strategy='lookup', or another drafter"
        )
    names = canonical_names(stored, *module)
    if isinstance(source, Path):
        source = read_weights(source, str(source), names.__contains__)
    tensors = {names[name]: tensor for name, tensor in source.items() if name in names}
    return MtpHead(what, module[0], tensors, target)


def _tensor_names(folder: Path) -> set[str]:
    """Return the names of all tensors in a folder without reading any."""
    names: set[str] = set()

    def collect(name: str) -> bool:
        names.add(name)
        return False

    read_weights(folder, str(folder), collect)
    return names


def _one_layer(what: str, tensors: Mapping[str, Tensor], target: PreTrainedModel) -> Any:
    """Return a model of the target's class with the module's layer and norm, on its device."""
    decoder: Any = target.get_decoder()
    if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
        raise UnsupportedError(
            f"{type(decoder).__name__} has no attributes `layers` and `norm`, which MTP modules "
            "need; use spec_strategy='draft' or 'lookup'"
        )
    check_packed(decoder)
    weights = {
        f"layers.0.{name.removeprefix(LAYER)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(LAYER)
    }
    config = _one_layer_config(decoder.config, any(".experts." in name for name in weights))
    weights["norm.weight"] = tensors["norm.weight"]
    weights["embed_tokens.weight"] = torch.zeros(1, config.hidden_size)
    # from_pretrained converts experts and other weights that are stored in another form.
    stack, info = type(decoder).from_pretrained(
        None, config=config, state_dict=weights, dtype=target.dtype, output_loading_info=True
    )
    mismatches = [f"{key} {sorted(map(str, info[key]))}" for key in info if info[key]]
    if mismatches:
        raise AssistantError(
            f"{what} does not fit a layer of {type(decoder).__name__}, maybe because it is stored "
            f"quantized: {'; '.join(mismatches)}"[:500]
        )
    return stack.to(target.device).eval()


def _one_layer_config(target_config: Any, experts: bool) -> Any:
    """Return the config of one layer with full attention, with or without experts."""
    config = copy.deepcopy(target_config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    layer_types = list(getattr(target_config, "mtp_layer_types", None) or ["full_attention"])
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": layer_types[:1],
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


def find_module(names: Iterable[str], num_layers: int) -> tuple[Layout, str] | None:
    """Return layout and name prefix of the first MTP module among a model's tensors.

    Layers with a number below `num_layers` belong to the model itself.
    """
    names = list(names)
    for layout in LAYOUTS:
        projection = re.compile(f"({layout.prefix}){re.escape(layout.parts[2])}\\.weight")
        matches = [match for match in map(projection.fullmatch, names) if match is not None]
        numbers = {match[1]: int(match[2]) for match in matches if match.re.groups > 1}
        prefixes = [m[1] for m in matches if numbers.get(m[1], num_layers) >= num_layers]
        if prefixes:
            return layout, min(prefixes, key=lambda prefix: numbers.get(prefix, 0))
    return None


def canonical_names(names: Iterable[str], layout: Layout, prefix: str) -> Mapping[str, str]:
    """Map stored to canonical names: `PARTS`, and those of the layer after `LAYER`."""
    parts = dict(zip(layout.parts, PARTS, strict=True))
    canonical = {}
    for name in names:
        rest = name.removeprefix(prefix)
        if rest == name or rest.startswith(COPIES):
            continue
        part = parts.get(rest.removesuffix(".weight"))
        if part is not None:
            canonical[name] = f"{part}.weight"
        elif rest.startswith(layout.layer):
            canonical[name] = LAYER + rest.removeprefix(layout.layer)
    return canonical


register_family(PublishedFamily(FAMILY, STRATEGY, build))
