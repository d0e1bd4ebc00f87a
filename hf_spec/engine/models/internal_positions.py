"""Positions of tree tokens for models that do not read `position_ids` everywhere.

- Decoders of the BART family look positions up in a table of their own by the number of cached
  tokens. During a generation the tables use the position ids of the forward pass that runs in their
  thread; outside of one they count. Counting treats padding as tokens (`padding_of`).
- Layers of Llama 4 without rotary positions scale each query by its position: the length of the
  cache plus the token's index in the forward pass. `QueryPositions` is a cache that reports the
  difference.
- Bloom and Falcon compute ALiBi (Press et al. 2021, arXiv 2108.12409) from a 2D padding mask, which
  a 4D tree mask breaks. Adding a constant per query does not change a softmax, so the bias is slope
  * key position. The models' builder of the bias is replaced while any forward pass needs it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon import modeling_falcon

from hf_spec.common.compat import CACHE_LENGTH_NAMES
from hf_spec.engine.forward.forward_overrides import ForwardOverrides

# Architecture -> the config setting that turns the scaling on.
SCALED_QUERIES = {"llama4_text": "attn_temperature_tuning"}
# Name under which models call the builder of their ALiBi.
BUILDER = "build_alibi_tensor"


def tables_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the position tables of a model; none if it takes position ids."""
    if {"position_ids", "decoder_position_ids"} & set(inspect.signature(model.forward).parameters):
        return []
    # The signature of the class: during a generation the module's own forward is replaced.
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and "position_ids" in (names := inspect.signature(type(module).forward).parameters)
        and not names.keys().isdisjoint(CACHE_LENGTH_NAMES)
    ]


def padding_of(model: PreTrainedModel, attention_mask: Tensor) -> list[int]:
    """Return per row of a (B, L) mask the number of padding tokens that the model counts."""
    counts = bool(tables_of(model))
    return (attention_mask == 0).sum(dim=1).tolist() if counts else [0] * len(attention_mask)


class _Forward(threading.local):
    # In this thread's forward pass: (B, T) int64 position ids of its tokens, and (B, S) int64 true
    # positions of all keys.
    positions: Tensor | None = None
    key_positions: Tensor | None = None


_forward = _Forward()
# Overrides of the tables of active models.
_overrides = ForwardOverrides()
# Overrides of the builders of ALiBi in models that run.
_builders = ForwardOverrides(BUILDER)


class _Lookup:
    """Forward of a table that uses the position ids of this thread's forward pass."""

    def __init__(self, table: nn.Module):
        self.plain = table.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positions = _forward.positions
        if positions is None:
            return self.plain(*args, **kwargs)
        # Some tables add a leading dimension; all return one line of embeddings.
        embeddings = self.plain(args[0], position_ids=positions.flatten())
        return embeddings.view(*positions.shape, -1)


def active(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let the tables of a model use explicit position ids."""
    return _overrides.install(tables_of(model), lambda new: {part: _Lookup(part) for part in new})


@contextmanager
def position_ids(positions: Tensor) -> Iterator[None]:
    """Run one forward pass of an active model at (B, T) int64 position ids."""
    before, _forward.positions = _forward.positions, positions
    try:
        yield
    finally:
        _forward.positions = before


def scales_queries(model: PreTrainedModel) -> bool:
    """Return True if layers of a model scale their queries by the length of its cache."""
    config = model.config.get_text_config()
    setting = SCALED_QUERIES.get(config.model_type)
    return setting is not None and bool(getattr(config, setting))


class QueryPositions:
    """Cache stand-in for one packed step; it stores nothing and reports token positions.

    The (T,) int64 `positions` are those in plain `generate()`, which counts padding.
    """

    def __init__(self, positions: Tensor):
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return (T,) numbers to add to the index of each token in the forward pass."""
        return self._lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the step alone; the attention function stores them."""
        return key_states, value_states


def uses_alibi(model: PreTrainedModel) -> bool:
    """Return True for models whose bias this module replaces."""
    kind = model.config.model_type
    return kind == "bloom" or (kind == "falcon" and bool(model.config.alibi))


@contextmanager
def tree_alibi(model: PreTrainedModel, key_positions: Tensor) -> Iterator[None]:
    """Compute the model's ALiBi from (B, S) int64 key positions inside the block."""
    if not uses_alibi(model):
        yield
        return
    bloom = model.config.model_type == "bloom"
    # Bloom calls a method of its decoder, Falcon a function of its module.
    owner: Any = model.transformer if bloom else modeling_falcon
    with _builders.install(
        [owner], lambda new: {part: _tree_builder(part, rounds=not bloom) for part in new}
    ):
        before, _forward.key_positions = _forward.key_positions, key_positions
        try:
            yield
        finally:
            _forward.key_positions = before


def _tree_builder(owner: Any, rounds: bool) -> Callable[..., Tensor]:
    """Return a builder of the bias; `rounds` if the owner's own multiplies in bfloat16."""
    plain: Callable[..., Tensor] = getattr(owner, BUILDER)

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        key_positions = _forward.key_positions
        if key_positions is None:
            return plain(mask, num_heads, dtype)
        # The bias of position 1 is the slope of each head.
        pair = key_positions.new_ones(1, 2)
        slopes = build_alibi_tensor(pair, num_heads, torch.float32)[:, 0, 1]
        # bfloat16 rounds from position 256 on, and the model was trained with that.
        slopes = slopes.bfloat16() if rounds else slopes
        bias = slopes[None, :, None] * key_positions[:, None, :]
        return bias.reshape(-1, 1, key_positions.shape[1]).to(dtype)

    return build
