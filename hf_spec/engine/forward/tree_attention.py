"""Attention of packed token trees, registered with transformers under the name `hf_spec`.

The model runs on one packed sequence (1, T) with the new tokens of every row. Each layer passes its
queries, keys and values to `tree_attention`, which stores the keys and values in the rows' slots
and lets every token attend to its own row: committed tokens first, then its ancestors in the tree.

A model looks its attention function up by the name in its config. The config itself is not changed,
because other threads, or a logits processor that calls the model, may read it at the same time.
Inside `PackedAttention.active` the config returns our name, in that thread and for that model only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from hf_spec_kernels import Scoring, kv_write, ragged_tree_attention
from hf_spec_kernels.ragged_tree_attention import implementation
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.forward.sdpa_attention import attend, store
from hf_spec.engine.forward.step import NOT_PASSED, LayerTraits, PackedStep, TracedStep

NAME = "hf_spec"

# These take the rectangular path although they may have the attention interface. Nemotron and
# StableLM drop the keyword arguments that attention functions need, DiffLlama attends twice per
# layer with different values, GIT uses the interface for images only, the layers of Zamba share an
# attention module without a layer index, and Whisper also attends to an encoder.
RECTANGULAR_ONLY = {"nemotron", "stablelm", "diffllama", "git", "whisper", "zamba", "zamba2"}


def tree_attention(  # noqa: PLR0913 - the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    spec_step: PackedStep | TracedStep | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then attend.

    Args:
        module: the attention module; it has a `layer_idx`.
        query: (1, H, T, D), rotated already.
        key: (1, H_kv, T, D), rotated already.
        value: (1, H_kv, T, Dv).
        attention_mask: ignored; `spec_step` defines what is visible.
        scaling: factor of the scores; 1 / sqrt(D) by default.
        dropout: ignored.
        spec_step: the step that the layer runs in.
        softcap: bound of the scores, applied by tanh.
        s_aux: (H,) attention sinks: one logit per head that takes probability and has no value.
        **kwargs: `sliding_window`: number of positions that a token attends to, its own included.

    Returns:
        (1, T, H, Dv) and None (no weights).

    Raises:
        UnsupportedError: if there is no step, or the layer attends twice in one step.
    """
    if spec_step is None:
        raise UnsupportedError(
            f"{type(module).__name__} called the attention {NAME!r} without a draft tree: the "
            "model does not pass it to its layers, or its config names this attention; generate "
            "without spec_strategy, or set another attn_implementation"
        )
    if isinstance(spec_step, TracedStep):
        window = kwargs.get("sliding_window", NOT_PASSED)
        return spec_step.attend(query, key, value, s_aux, scaling, softcap, window), None
    layer_index: Any = module.layer_idx
    if layer_index in spec_step.written:
        raise UnsupportedError(
            f"{type(module).__name__} {layer_index} attends twice in one forward, so a tree would "
            "overwrite its own keys and values; generate without spec_strategy"
        )
    spec_step.written[layer_index] = module
    # Under autocast rotary embeddings make them float32. SDPA would cast them, too.
    query, key = query.to(value.dtype), key.to(value.dtype)
    traits = spec_step.traits_of(module)
    keys, values = spec_step.pool.layer(traits.storage, key, value)
    window = traits.window_of(kwargs.get("sliding_window", NOT_PASSED))
    scoring = _scoring(scaling, window, softcap, traits.chunk)
    if s_aux is not None:
        scoring = replace(scoring, sinks=s_aux.float())
    kernel = select_kernel(spec_step, query, values, scoring)
    if traits.storage == layer_index:
        _store(spec_step, kernel, (key, value), (keys, values))
    return _attend(spec_step, kernel, query, (keys, values), scoring), None


@cache
def _scoring(
    scale: float | None, window: int | None, softcap: float | None, chunk: int | None
) -> Scoring:
    return Scoring(scale, window, softcap, chunk=chunk)


def attend_stored(
    step: PackedStep, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Attend with (1, H, T, D) queries to a layer's buffers, as (1, T, H, Dv); store nothing."""
    kernel = select_kernel(step, query, values, scoring)
    return _attend(step, kernel, query, (keys, values), scoring)


def select_kernel(step: PackedStep, query: Tensor, values: Tensor, scoring: Scoring) -> str | None:
    """Return the kernel implementation that runs a step, or None for SDPA on its segments.

    SDPA runs prompts faster, unless it would have to compute all scores one by one.
    """
    plain = scoring.softcap is None and scoring.sinks is None
    if step.has_prompt and plain and query.shape[-1] == values.shape[-1]:
        return None
    name = implementation(query, values)
    # Without segments, or with bits that only the device has, a step exists as a layout only.
    needs_layout = not step.segments or step.sees is not None
    return name if name != "torch" or needs_layout else None


def _attend(
    step: PackedStep,
    kernel: str | None,
    query: Tensor,
    buffers: tuple[Tensor, Tensor],
    scoring: Scoring,
) -> Tensor:
    keys, values = buffers
    if kernel is None:
        return attend(step.groups, query, keys, values, scoring)
    layout, _ = step.layout(query.device)
    by_token = query[0].transpose(0, 1)
    return ragged_tree_attention(by_token, keys, values, layout, scoring, kernel)[None]


def _store(
    step: PackedStep,
    kernel: str | None,
    new: tuple[Tensor, Tensor],
    buffers: tuple[Tensor, Tensor],
) -> None:
    """Write (1, H_kv, T, D) keys and values into the buffers of their layer."""
    if kernel is None:
        for states, buffer in zip(new, buffers, strict=True):
            store(step.target(buffer.device), states, buffer)
        return
    (key, value), (keys, values) = new, buffers
    _, slot_mapping = step.layout(key.device)
    by_token = key[0].transpose(0, 1), value[0].transpose(0, 1)
    kv_write(*by_token, keys, values, slot_mapping, kernel)


def register() -> None:
    """Register `hf_spec` with transformers; models use it inside `PackedAttention.active`."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def unregister() -> None:
    """Restore the patched config classes."""
    with _lock:
        while _patched:
            owner, original = _patched.popitem()
            owner._attn_implementation = original  # type: ignore[assignment]


def takes_packed(model: PreTrainedModel) -> bool:
    """Return True if `model` can run packed trees; others take the rectangular path."""
    supported = model._can_set_attn_implementation()
    return bool(supported) and model.config.model_type not in RECTANGULAR_ONLY


class _PackedConfigs(threading.local):
    """Ids of the configs that return our name in this thread."""

    ids: frozenset[int] = frozenset()


_packed_configs = _PackedConfigs()
_lock = threading.Lock()
# Patched config classes -> their original property.
_patched: dict[type[PreTrainedConfig], property] = {}


class PackedAttention:
    """Lets one model attend by `tree_attention`; it must satisfy `takes_packed`.

    Attributes:
        traits: traits of its layers, for the steps of the model.
    """

    def __init__(self, model: PreTrainedModel):
        self.traits: dict[int, LayerTraits] = {}
        # Layers borrowed from another model look the name up in that model's config.
        configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
        self._configs = [c for c in configs.values() if isinstance(c, PreTrainedConfig)]
        self._ids = frozenset(map(id, self._configs))
        for owner in {_property_owner(type(config)) for config in self._configs}:
            _patch(owner)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the model with `tree_attention` in this thread."""
        before, _packed_configs.ids = _packed_configs.ids, self._ids
        try:
            yield
        finally:
            _packed_configs.ids = before


def _property_owner(config: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the class that defines the property; models may define their own."""
    return next(cls for cls in config.__mro__ if "_attn_implementation" in vars(cls))


def _patch(owner: type[PreTrainedConfig]) -> None:
    """Let configs of a class return our name while they are in `_packed_configs`."""
    with _lock:
        if owner in _patched:
            return
        original: Any = vars(owner)["_attn_implementation"]

        def lookup(config: PreTrainedConfig) -> str | None:
            return NAME if id(config) in _packed_configs.ids else original.fget(config)

        _patched[owner] = original
        owner._attn_implementation = property(lookup, original.fset)  # type: ignore[assignment]
