"""Compiling a decoder layer for a CPU: trace it on tensors without data, generate C++, build it.

Linear layers and attention are traced as custom operations, for which the compiled layer calls the
same kernels as an uncompiled one. Weights are inputs, so layers of one kind share one C++ function.
The low-rank changes of linear layers and the gate of a step are inputs, too. `fused_layer` compiles
for a GPU what is traced here.
"""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from operator import is_
from typing import Any, Protocol

import torch
from hf_spec_kernels.decoder_layer import Call, build_layer
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_spec.backend.cpu.layer_source import LayerSource, layer_source
from hf_spec.backend.cpu.layer_text import SourceError
from hf_spec.engine.fast.packed_linear import is_quantized
from hf_spec.engine.forward.step import PackedStep, TracedStep

# Name under which layers pass the step on.
STEP = "spec_step"
PLAIN = (bool, int, float, str, type(None))
# Longer inputs run uncompiled.
MAX_TRACED_TOKENS = 2048
# Endings of the names of A and B^T of low-rank changes, after the name of the changed weight.
DOWN, UP = ":down", ":up"
# Number of tokens in traced inputs; the compiled layer takes any number.
TRACED_TOKENS = 3


@dataclass(frozen=True)
class ResultForm:
    """Form of a layer's result: per part False for None, and whether it is a tuple."""

    parts: tuple[bool, ...]
    is_tuple: bool

    @classmethod
    def of(cls, result: Any) -> ResultForm:
        """Return the form of a result."""
        parts = (isinstance(part, Tensor) for part in as_tuple(result))
        return cls(tuple(parts), isinstance(result, tuple))

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the layer returns, given the tensors in it."""
        if self.parts == (True,) and not self.is_tuple:
            return tensors[0]
        remaining = iter(tensors)
        parts = tuple(next(remaining) if is_tensor else None for is_tensor in self.parts)
        return parts if self.is_tuple else parts[0]


@dataclass(frozen=True, eq=False)
class LayerFunction:
    """C++ function of decoder layers and calls of one kind; see `build_layer` for `run`."""

    run: Callable[..., None]
    source: LayerSource
    form: ResultForm


@dataclass(frozen=True)
class TracedLayer:
    """A layer as a graph of PyTorch operations.

    Attributes:
        module: the graph; its inputs are the layer's weights, then the tensors of a call.
        inputs: the traced inputs, without data.
        form: what the layer returns.
    """

    module: fx.GraphModule
    inputs: Sequence[Tensor]
    form: ResultForm

    def check_lengths(self) -> None:
        """Raise an error if the graph, or code generated from it, holds for some lengths only."""
        from sympy import lambdify

        shapes: Any = next(iter(self.inputs)).fake_mode.shape_env  # type: ignore[attr-defined]
        # Branches taken on the number of tokens, as in `if states.shape[1] < 8`.
        for guard in shapes.guards:
            numbers = list(guard.expr.free_symbols)
            holds = lambdify(numbers, guard.expr, "math")
            if not all(
                holds(*[length] * len(numbers)) for length in range(2, MAX_TRACED_TOKENS + 1)
            ):
                raise RuntimeError(f"it branches on the number of tokens ({guard.expr})")


class LayerCall:
    """Arguments of a decoder layer: plain values, tensors, tuples of them.

    A `spec_step` is None here: the step refers to its calls, so they must not refer to the step.
    The layers of a model usually get the same arguments in a step, except for the hidden states.
    One call then serves all of them, and its keys are computed once per step; see `repeat`.

    Attributes:
        tensors: all tensors, contiguous as compiled layers expect them; the last one is the gate of
            the step if it has one.
        num_tokens: T of the hidden states (1, T, width), the first tensor.
        has_gate: True if there is a gate.
        key: set by `CompiledLayers.key_of`, for the model in `key_owner`.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], gate: Tensor | None = None):
        self.args = args
        self.kwargs = kwargs
        self.has_gate = gate is not None
        self.key = -1
        self.key_owner: object = None
        self._rest = (*args[1:], *self.kwargs.values())
        self._leaves: list[Any] = []
        for value in (*args[:1], *self._rest):
            self._leaves += value if type(value) is tuple else [value]
        self._leaves += [gate] if self.has_gate else []
        self.tensors = [leaf.contiguous() for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.num_tokens: int = self.tensors[0].shape[-2]
        # Hidden states come first; lists may change in place.
        self._is_repeatable = len(args) > 0 and type(args[0]) is Tensor
        self._is_repeatable &= not any(type(leaf) is list for leaf in self._leaves)
        self._arguments: _Arguments | None = None

    def repeat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Take the hidden states of another call; return False if anything else differs."""
        if not self._is_repeatable or len(args) != len(self.args) or [*kwargs] != [*self.kwargs]:
            return False
        states, like = args[0], self.tensors[0]
        if states.shape != like.shape or states.dtype != like.dtype:
            return False
        if not all(map(is_, (*args[1:], *kwargs.values()), self._rest)):
            return False
        self.tensors[0] = states.contiguous()
        return True

    @cached_property
    def program_key(self) -> tuple[object, ...] | None:
        """Key that is equal for calls of one compiled layer; None with arguments of other types."""
        parts: list[object] = [*self.kwargs, self.has_gate]
        for leaf in self._leaves:
            if isinstance(leaf, Tensor):
                tokens = _token_axis(leaf, self.num_tokens)
                shape = (None if axis == tokens else size for axis, size in enumerate(leaf.shape))
                parts.append((leaf.dtype, leaf.device, *shape))
            elif _is_plain(leaf):
                parts.append(_value(leaf))
            else:
                return None
        return tuple(parts)

    def arguments(self, step: PackedStep | None, results: Sequence[Tensor]) -> int:
        """Return the address of the C++ `Call` that writes to `results`; valid until the next."""
        if self._arguments is None or len(self._arguments.outputs) != len(results):
            self._arguments = _Arguments(self, step, len(results))
        self._arguments.inputs[0] = self.tensors[0].data_ptr()
        self._arguments.outputs[:] = [result.data_ptr() for result in results]
        return ctypes.addressof(self._arguments.call)

    def with_tensors(
        self, tensors: Iterator[Tensor], step: TracedStep
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors and another step."""

        def other(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(map(other, value))
            return next(tensors) if isinstance(value, Tensor) else value

        args = tuple(map(other, self.args))
        return args, {
            name: step if name == STEP else other(value) for name, value in self.kwargs.items()
        }


class _Arguments:
    """The C++ `Call` of a layer call, with the arrays that it points to."""

    def __init__(self, call: LayerCall, step: PackedStep | None, num_outputs: int):
        self.inputs = addresses_of(call.tensors)
        self.outputs = (ctypes.c_void_p * num_outputs)()
        layout, slot_mapping = (None, None) if step is None else step.addresses or (None, None)
        self.call = Call(
            ctypes.addressof(self.inputs),
            ctypes.addressof(self.outputs),
            slot_mapping,
            layout,
            call.num_tokens,
            torch.get_num_threads(),
        )


def addresses_of(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return a C array of the addresses of tensors."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@cache
def library() -> torch.library.Library:
    """Define `hf_spec::attend`, `multiply` and `change`, which C++ stands for when they are run."""
    defined = torch.library.Library("hf_spec", "DEF")
    defined.define(
        "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, float? scaling, "
        "float? softcap, int? window) -> Tensor"
    )
    defined.define("multiply(Tensor states, Tensor weight, Tensor? bias) -> Tensor")
    defined.define(
        "change(Tensor result, Tensor states, Tensor down, Tensor up, Tensor gate) -> Tensor"
    )

    def attended(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def multiplied(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return states.new_empty(*states.shape[:-1], weight.shape[0])

    def changed(result: Tensor, *rest: Tensor) -> Tensor:
        return torch.empty_like(result)

    torch.library.register_fake("hf_spec::attend", attended, lib=defined)
    torch.library.register_fake("hf_spec::multiply", multiplied, lib=defined)
    torch.library.register_fake("hf_spec::change", changed, lib=defined)
    return defined


# (rank, K) down, (rank, N) up and (T,) gate of a low-rank change.
Change = tuple[Tensor, Tensor, Tensor]


class Linear(Protocol):
    """Stands for `F.linear` in a traced layer, with the low-rank change of the weight if any."""

    def __call__(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, change: Change | None
    ) -> Tensor:
        """Return (..., N) results of (..., K) states."""


class _LinearAs(TorchFunctionMode):
    """Traces `F.linear` as another function; `changes` are by id of the weight."""

    def __init__(self, linear: Linear, changes: Mapping[int, Change]):
        super().__init__()
        self._linear = linear
        self._changes = changes

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return self._traced(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _traced(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        return self._linear(input, weight, bias, self._changes.get(id(weight)))


def _multiply(states: Tensor, weight: Tensor, bias: Tensor | None, change: Change | None) -> Tensor:
    result: Tensor = torch.ops.hf_spec.multiply(states, weight, bias)
    return result if change is None else torch.ops.hf_spec.change(result, states, *change)


def compile_layer(
    layer: nn.Module, weights: Mapping[str, Tensor], call: LayerCall
) -> LayerFunction:
    """Compile calls of one kind for all layers of one kind.

    Raises:
        Exception: `SourceError`, `BuildError`, or any error of PyTorch's tracing tools.
    """
    traced = traced_layer(layer, weights, call, _multiply)
    source = layer_source(traced.module.graph, len(weights))
    return LayerFunction(build_layer(source.text), source, traced.form)


def traced_layer(
    layer: nn.Module,
    weights: Mapping[str, Tensor],
    call: LayerCall,
    linear: Linear,
) -> TracedLayer:
    """Trace the calls of one kind; `linear` stands for `F.linear`, and attention is `attend`.

    Low-rank changes are among the weights; they apply to the tokens that the call's gate chooses.

    Raises:
        Exception: `SourceError`, or any error of PyTorch's tracing tools.
    """
    if call.program_key is None:
        raise SourceError("an argument is neither a tensor nor a plain value")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    library()
    copied = _copy(layer)
    returned: list[Any] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        step = TracedStep(torch.ops.hf_spec.attend)
        args, kwargs = call.with_tensors(iter(tensors[len(weights) :]), step)
        named, changes = dict(zip(weights, tensors, strict=False)), {}
        for name in weights:
            if name + DOWN in named:
                change = named.pop(name + DOWN), named.pop(name + UP), tensors[-1]
                changes[id(named[name])] = change
        with _LinearAs(linear, changes):
            returned[:] = [functional_call(copied, named, args, kwargs)]
        return [part for part in as_tuple(returned[0]) if isinstance(part, Tensor)]

    mode = FakeTensorMode(shape_env=ShapeEnv())
    tensors = [*weights.values(), *call.tensors]
    axes = [*[None] * len(weights), *(_token_axis(t, call.num_tokens) for t in call.tensors)]
    inputs = [
        _fake_input(mode, number, tensor, axis)
        for number, (tensor, axis) in enumerate(zip(tensors, axes, strict=True))
    ]
    with mode, _muted_tracing_log():
        traced = make_fx(run)(*inputs)
    if any(node.op == "get_attr" for node in traced.graph.nodes):
        raise RuntimeError("it computes with tensors that are neither parameters nor buffers")
    traced.graph.eliminate_dead_code()
    found = TracedLayer(traced, inputs, ResultForm.of(returned[0]))
    found.check_lengths()
    return found


@contextmanager
def _muted_tracing_log() -> Iterator[None]:
    """Silence PyTorch's log: a layer that cannot be traced runs uncompiled without an error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _fake_input(mode: Any, number: int, tensor: Tensor, tokens: int | None) -> Tensor:
    """Return a tensor without data, with a symbolic number of tokens along the axis `tokens`."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if type(tensor) not in (Tensor, nn.Parameter):
        # Weights in 4 or 8 bits.
        tensor = tensor.data
    if tokens is not None:
        # PyTorch specializes on sizes of 1.
        tensor = tensor.narrow(tokens, 0, 1).repeat_interleave(TRACED_TOKENS, tokens)
    sizes = [DimDynamic.DYNAMIC if a == tokens else DimDynamic.STATIC for a in range(tensor.ndim)]
    fake: Tensor = mode.from_tensor(
        tensor,
        static_shapes=tokens is None,
        source=ConstantSource(f"input{number}"),
        symbolic_context=None if tokens is None else StatelessSymbolicContext(sizes),
    )
    return fake


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return a layer's result as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _copy(layer: nn.Module) -> nn.Module:
    """Return a copy with shared weights, without hooks and overridden forwards."""
    # Other threads may be running the layer itself.
    shared: list[Any] = [*tensors_of(layer).values()]
    for module in layer.modules():
        names = ("config", "forward", "state") if is_quantized(module) else ("config", "forward")
        shared += [vars(module)[name] for name in names if name in vars(module)]
    copied = copy.deepcopy(layer, {id(value): value for value in shared})
    for module in list(copied.modules()):
        module.__dict__.pop("forward", None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        for name, part in list(module.named_children()):
            if is_quantized(part):
                setattr(module, name, _QuantizedLinear(part))
    return copied


class _QuantizedLinear(nn.Module):
    """Stands for a layer of bitsandbytes, whose code cannot be traced."""

    def __init__(self, layer: Any):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        self.bias = layer.bias

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight, self.bias)


def _token_axis(tensor: Tensor, tokens: int) -> int | None:
    """Return the axis of an input that counts tokens; None if there is none."""
    if tokens > 1:
        return next((axis for axis, size in enumerate(tensor.shape) if size == tokens), None)
    # A single token is expected where models have it: (1, T, ...) states or (T,) positions.
    axis = min(1, tensor.ndim - 1)
    return axis if tensor.ndim in (1, 2, 3) and tensor.shape[axis] == 1 else None


def _is_plain(leaf: Any) -> bool:
    """Return True for plain values and lists of them, such as indices of hidden states."""
    return isinstance(leaf, PLAIN) or (type(leaf) is list and all(map(_is_plain, leaf)))


def _value(leaf: Any) -> Any:
    return tuple(map(_value, leaf)) if type(leaf) is list else leaf
