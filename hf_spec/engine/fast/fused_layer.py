"""Compiling a decoder layer for a GPU: PyTorch's Inductor fuses its small operations.

Norms, rotary embeddings, activations and residuals take about 25 launches in an uncompiled layer,
and about five in a fused one. Products of matrices stay those of PyTorch, and attention stays the
kernels of hf_spec. CUDA graphs capture fused layers like others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.engine.fast.layer_tracing import (
    Change,
    LayerCall,
    ResultForm,
    library,
    traced_layer,
)
from hf_spec.engine.forward.step import NOT_PASSED, PackedStep
from hf_spec.engine.forward.tree_attention import tree_attention

# Intermediate values are rounded to the dtype of the layer, as in the uncompiled layer.
OPTIONS = {"emulate_precision_casts": True}


@dataclass(frozen=True, eq=False)
class FusedFunction:
    """Generated code of decoder layers of one kind.

    `run` takes the weights and the tensors of a call, and returns the tensors in the result.
    """

    run: Callable[..., Sequence[Tensor]]
    form: ResultForm


@torch.no_grad()
def fuse_layer(layer: nn.Module, weights: Mapping[str, Tensor], call: LayerCall) -> FusedFunction:
    """Compile calls of one kind for all layers of one kind.

    Raises:
        Exception: `SourceError`, or any error of PyTorch's compiler.
    """
    from torch import _inductor

    _define_attention()
    traced = traced_layer(layer, weights, call, _linear)
    run: Any = _inductor.compile(traced.module, list(traced.inputs), options=OPTIONS)
    # Generated code is not checked when it is called.
    traced.check_lengths()
    return FusedFunction(run, traced.form)


class _Running(threading.local):
    """Attention module and step of the layer that the thread runs."""

    layer: tuple[nn.Module, PackedStep] | None = None


_running = _Running()


class FusedLayer:
    """Runs a fused layer with the weights of one decoder layer; threads may share it.

    The `weights` are the layer's parameters and buffers, in the order in which it was traced. Its
    `attention` registers with every step.
    """

    def __init__(
        self,
        function: FusedFunction,
        weights: Mapping[str, Tensor],
        layer: nn.Module,
        attention: nn.Module,
    ):
        self._function = function
        self._attention = attention
        self._weights = list(weights.values())

    def __call__(self, call: LayerCall, step: PackedStep) -> Any:
        """Return the layer's result."""
        _running.layer = self._attention, step
        try:
            tensors = self._function.run(*self._weights, *call.tensors)
        finally:
            # The step holds keys and values.
            _running.layer = None
        return self._function.form.filled(tensors)


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None, change: Change | None) -> Tensor:
    """`F.linear` on a matrix: on three axes, some versions trace it for one number of tokens."""
    rows = states.flatten(0, -2)
    result = F.linear(rows, weight, bias)
    if change is not None:
        down, up, gate = change
        changed = result + F.linear(rows, down) @ up
        # Other tokens keep their bits, also where the change is not finite.
        result = torch.where(gate[:, None], changed, result)
    return result.view(*states.shape[:-1], weight.shape[0])


def _attend(  # noqa: PLR0913 - the arguments of the operation
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    assert _running.layer is not None, "attention runs inside a layer"
    module, step = _running.layer
    passed = {} if window == NOT_PASSED else {"sliding_window": window}
    states = (query, key, value, None)
    options: dict[str, Any] = {"softcap": softcap, "s_aux": sinks, **passed}
    return tree_attention(module, *states, scaling=scaling, spec_step=step, **options)[0]


@cache
def _define_attention() -> None:
    """Let `hf_spec::attend` run the attention of the current layer."""
    library().impl("attend", _attend, "CompositeExplicitAutograd")
