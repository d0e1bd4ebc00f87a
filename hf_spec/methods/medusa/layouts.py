"""Layouts of Medusa heads: FasterDecoding's and vLLM's, with a draft vocabulary or without.

Canonical names are FasterDecoding's: "i.j.linear.weight" and "i.j.linear.bias" of block j of head
i, "i.J.weight" of the projection after J blocks. vLLM names them "blocks.i.layers.j.weight",
"blocks.i.layers.j.bias" and "lm_heads.i.weight"; it cuts projections to R tokens, whose ids are in
"token_map". A projection that all heads share is "lm_head.weight".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.common.errors import AssistantError
from hf_spec.methods.published_weights import sizes_of

# Prefix of the heads in repositories of version 1.0, which may also hold the whole model.
PREFIXES = ("medusa_head.", "medusa_heads.")
TOKEN_MAP = "token_map"


def canonical_tensors(head: PublishedHead) -> dict[str, Tensor]:
    """Return the tensors of a head under canonical names, without "token_map"."""
    prefix = next((p for p in PREFIXES if any(k.startswith(p) for k in head.tensors)), "")
    stored = {
        key.removeprefix(prefix): tensor
        for key, tensor in head.tensors.items()
        if key.startswith(prefix) and key != TOKEN_MAP
    }
    return _from_vllm(stored) if any(key.startswith("blocks.") for key in stored) else stored


def draft_vocabulary(head: PublishedHead, vocab: int) -> Tensor | None:
    """Return the (R,) int64 token ids of the head's outputs; None for the whole vocabulary."""
    ids = head.tensors.get(TOKEN_MAP)
    if ids is None:
        return None
    ids = ids.long()
    inside = ids.ndim == 1 and len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < vocab
    if not inside or len(ids.unique()) < len(ids):
        raise AssistantError(
            f"{head.name!r} is for another target, or damaged: its token_map is not a list of "
            f"different tokens below {vocab}"
        )
    return ids


def for_vllm(
    tensors: Mapping[str, Tensor], vocabulary: Tensor | None, model: PreTrainedModel
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a head in vLLM's layout; `tensors` have canonical names."""
    size, vocab = sizes_of(model)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (block := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)) is not None:
            stored["blocks.{}.layers.{}.{}".format(*block.groups())] = tensor
        else:
            stored[f"lm_heads.{name.partition('.')[0]}.weight"] = tensor
    layers = [name for name in stored if re.fullmatch(r"blocks\.0\.layers\.\d+\.weight", name)]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        # vLLM reads any names with "num" and "heads" or "layers".
        "medusa_num_heads": len({name.partition(".")[0] for name in tensors}),
        "medusa_num_layers": len(layers),
        "medusa_fc_bias": True,
        "hidden_size": size,
        "vocab_size": vocab,
        "truncated_vocab_size": vocab if vocabulary is None else len(vocabulary),
    }
    if vocabulary is not None:
        stored[TOKEN_MAP] = vocabulary
    return config, stored


def _from_vllm(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in vLLM's layout under canonical names."""
    renamed: dict[str, Tensor] = {}
    depths: dict[str, int] = {}
    for name, tensor in stored.items():
        if (block := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)) is None:
            continue
        level, layer, kind = block.groups()
        renamed[f"{level}.{layer}.linear.{kind}"] = tensor
        depths[level] = max(depths.get(level, 0), int(layer) + 1)
        if kind == "weight":
            # vLLM's blocks have no bias by default.
            renamed.setdefault(f"{level}.{layer}.linear.bias", tensor.new_zeros(len(tensor)))
    shared = stored.get("lm_head.weight")
    for level, depth in depths.items():
        projection = stored.get(f"lm_heads.{level}.weight", shared)
        if projection is not None:
            renamed[f"{level}.{depth}.weight"] = projection
    return renamed
