"""Layouts of MTP modules in a model's files: tensor names, and switches that names do not show.

The names alone identify a layout. Published models have one module, a few have several; the first
is used. The switches follow vLLM and the models' own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    """

    prefix: str
    layer: str
    parts: tuple[str, str, str, str]
    features_first: bool = False
    zeroes_first_embedding: bool = False
    recycles_raw_output: bool = False


LAYERNORMS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
LAYOUTS = (
    # DeepSeek-V3, GLM-4.5, Kimi-K2: numbered after the model's last layer.
    Layout(
        r"(?:model\.|language_model\.)*layers\.(\d+)\.",
        "",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        zeroes_first_embedding=True,
        recycles_raw_output=True,
    ),
    # Qwen3-Next, Qwen3.5 and 3.6, Mellum.
    Layout(r"mtp\.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    # MiMo.
    Layout(
        r"model\.mtp_layers\.0\.", "", LAYERNORMS, features_first=True, zeroes_first_embedding=True
    ),
    # The package speculators.
    Layout(r"mtp_layers\.0\.", "", LAYERNORMS),
)


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
