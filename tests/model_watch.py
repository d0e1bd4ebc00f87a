"""Helpers to check that a model is left unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_spec.engine.fast.cuda_graphs import is_of_transformers


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return the identity of every attribute of every module, and the values of every config."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, dict):
                found[f"{name}.{key} items"] = {k: id(v) for k, v in value.items()}
            if isinstance(value, PreTrainedConfig):
                found[f"{name}.{key} values"] = repr(value.to_dict())
                found[f"{name}.{key} attention"] = value._attn_implementation
    if isinstance(model, PreTrainedModel) and model.can_generate():
        found["generation_config"] = repr(model.generation_config.to_dict())
    return found


def left_behind(models: Iterable[PreTrainedModel]) -> list[str]:
    """Return the modules that still have hooks or a replaced `forward`."""
    found = []
    for model in models:
        for name, module in model.named_modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if "forward" in vars(module) or not all(map(is_of_transformers, hooks)):
                found.append(f"{type(model).__name__}.{name}")
    return found


@contextmanager
def count_forwards(*models: PreTrainedModel) -> Iterator[list[PreTrainedModel]]:
    """Yield a list that gains an entry with every forward pass of the models."""
    calls: list[PreTrainedModel] = []
    handles = [m.register_forward_pre_hook(lambda m, _: calls.append(m)) for m in models]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
