"""Runs the original code of modules that were compiled with `torch.compile`.

A draft changes its shape every round, and an attention step is a Python object: a compiled forward
would be compiled again for each, until PyTorch gives up. The original launches are captured as CUDA
graphs instead. `torch.compile(model)` itself needs nothing: its `generate()` is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_spec.engine.forward.forward_overrides import ForwardOverrides

# `module.compile()` sets the first, `module.forward = torch.compile(module.forward)` the second.
_calls = ForwardOverrides("_compiled_call_impl")
_forwards = ForwardOverrides()


@contextmanager
def original_forwards(model: nn.Module) -> Iterator[None]:
    """Bypass `torch.compile` in all modules of a model inside the block."""
    modules = list(model.modules())
    called = [
        module
        for module in modules
        if vars(module).get("_compiled_call_impl") is not None or _calls.is_installed(module)
    ]
    replaced = [
        module
        for module in modules
        if _original(module) is not None or _forwards.is_installed(module)
    ]
    with (
        _calls.install(called, dict.fromkeys),
        _forwards.install(replaced, lambda new: {module: _original(module) for module in new}),
    ):
        yield


def _original(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that was compiled to the forward of a module; None without one."""
    original: Callable[..., Any] | None = None
    forward: Any = vars(module).get("forward")
    while (forward := getattr(forward, "_torchdynamo_orig_callable", None)) is not None:
        original = forward
    return original
