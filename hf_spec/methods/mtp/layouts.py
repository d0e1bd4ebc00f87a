"""MTP modules in the files of a model: where their tensors are, and how each layout is meant.

Names alone tell the layouts apart. Published models have one module, a few several; the first one
is used. What is open in the names is what vLLM and the models' own code do: whether the token's
embedding or the feature comes first in the projection, whether the first position of a text has no
embedding, and whether the next step gets what the layer says or what its norm makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Copies of the target's own embedding and head.
COPIES = ("embed_tokens.", "shared_head.head.")
# What a module has beside its layer, under our names, in the order of `Layout.parts`.
PARTS = ("embedding_norm", "feature_norm", "projection", "norm")
LAYER = "layer."


@dataclass(frozen=True)
class Layout:
    """One way to store a module.

    Attributes:
        prefix: pattern of what its names begin with, maybe with the number of a layer.
        layer: what those of its decoder layer have after that.
        parts: names of the others: the norms of embedding and feature, the projection, the norm.
        features_first: whether the projection reads the feature before the embedding.
        hides_first: whether the token of the first pair of a text has no embedding.
        hands_on_raw: whether the next step gets the layer's output as it is.
    """

    prefix: str
    layer: str
    parts: tuple[str, str, str, str]
    features_first: bool = False
    hides_first: bool = False
    hands_on_raw: bool = False


LAYERNORMS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
LAYOUTS = (
    # DeepSeek-V3, GLM-4.5, Kimi-K2: layers after the last one.
    Layout(
        r"(?:model\.|language_model\.)*layers\.(\d+)\.",
        "",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        hides_first=True,
        hands_on_raw=True,
    ),
    # Qwen3-Next, Qwen3.5 and 3.6, Mellum.
    Layout(r"mtp\.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    # MiMo.
    Layout(r"model\.mtp_layers\.0\.", "", LAYERNORMS, features_first=True, hides_first=True),
    # What the package speculators writes.
    Layout(r"mtp_layers\.0\.", "", LAYERNORMS),
)


def find_module(names: Iterable[str], num_layers: int) -> tuple[Layout, str] | None:
    """The layout of the first module among the tensors of a model, and what its names begin with.

    A layer of a number below `num_layers` is the model's own.
    """
    names = list(names)
    for layout in LAYOUTS:
        projection = re.compile(f"({layout.prefix}){re.escape(layout.parts[2])}\\.weight")
        found = [match for match in map(projection.fullmatch, names) if match is not None]
        numbers = {match[1]: int(match[2]) for match in found if match.re.groups > 1}
        own = [match[1] for match in found if numbers.get(match[1], num_layers) >= num_layers]
        if own:
            return layout, min(own, key=lambda prefix: numbers.get(prefix, 0))
    return None


def own_names(names: Iterable[str], layout: Layout, prefix: str) -> Mapping[str, str]:
    """Stored name -> ours, of every tensor of the module: `PARTS`, and `LAYER` for its layer."""
    parts = dict(zip(layout.parts, PARTS, strict=True))
    found = {}
    for name in names:
        rest = name.removeprefix(prefix)
        if rest == name or rest.startswith(COPIES):
            continue
        part = parts.get(rest.removesuffix(".weight"))
        if part is not None:
            found[name] = f"{part}.weight"
        elif rest.startswith(layout.layer):
            found[name] = LAYER + rest.removeprefix(layout.layer)
    return found
