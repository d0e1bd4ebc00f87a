"""Position tables: learned or sinusoidal embeddings of a fixed number of positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_spec.engine.models.cross_attention import decoding_parts

# Parts of the names of modules and buffers that are tables.
NAMES = ("wpe", "position", "pos_encoding")


def num_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions of a model's table; None if its positions have no end.

    A forward pass past the end of a table fails. Rotary embeddings that are computed, ALiBi, layers
    without positions and tables that grow have no end, whatever length the config contains.
    """
    config: Any = model.config.get_text_config()
    if getattr(config, "rope_parameters", None):
        return None
    # Whisper has different names for its encoder and its decoder.
    names = ("max_target_positions", "max_position_embeddings")
    lengths = [getattr(config, name, None) for name in names]
    # Towers of other modalities have tables of their own sizes.
    sizes = {size for part in decoding_parts(model) for size in _table_sizes(part)}
    return next((length for length in lengths if length in sizes), None)


def _table_sizes(part: nn.Module) -> Iterator[int]:
    for name, module in part.named_modules():
        if isinstance(module, nn.Embedding) and _is_table(name):
            # OPT and BART reserve the first entries.
            yield module.num_embeddings - getattr(module, "offset", 0)
    for name, buffer in part.named_buffers():
        if _is_table(name) and buffer.ndim == 2:
            yield len(buffer)


def _is_table(name: str) -> bool:
    return any(part in name.rpartition(".")[2] for part in NAMES)
