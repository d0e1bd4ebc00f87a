"""A decoder layer as a program: traced on tensors without contents, written in C++, built.

Products and attention are operations of their own in what is traced, which the program computes as
they are computed outside: from packed weights, and by our kernels on the rows' storage. Weights are
inputs, so that layers of one kind share a program. What traces are private tools of PyTorch, as
they are wherever code is traced that is not compiled as a whole; whatever they raise is a reason to
run a layer as it is.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hf_spec_kernels.decoder_layer import build_layer
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_spec.backend.cpu.layer_source import LayerSource, layer_source
from hf_spec.backend.cpu.layer_values import SourceError
from hf_spec.engine.forward.tree_attention import PackedStep, TracedStep

PLAIN = (bool, int, float, str, type(None))
# Of a step, and of a prompt that runs at once; more run as they come.
MAX_TOKENS = 2048
# Tokens that a layer is traced with, of which the program takes any number.
TRACED_TOKENS = 3


@dataclass(frozen=True)
class LayerProgram:
    """The program of layers and calls of one kind.

    Attributes:
        run: the function, see `build_layer`.
        source: what it is called with.
        results: what the layer returns: which parts are tensors, None in place of others.
        is_tuple: whether it returns a tuple of them.
    """

    run: Callable[..., None]
    source: LayerSource
    results: tuple[bool, ...]
    is_tuple: bool

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the layer returns, of the tensors in it."""
        found = iter(tensors)
        parts = tuple(next(found) if is_tensor else None for is_tensor in self.results)
        return parts if self.is_tuple else parts[0]


class LayerCall:
    """What a layer is called with: values, tensors, pairs of them, and a `spec_step`.

    Attributes:
        tensors: its tensors, contiguous as programs expect them.
        num_tokens: T of the hidden states (1, T, width), which come first.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args = args
        self.kwargs = kwargs
        self._leaves: list[Any] = []
        for value in (*args, *kwargs.values()):
            if type(value) is tuple:
                self._leaves += value
            elif type(value) is not PackedStep:
                self._leaves.append(value)
        self.tensors = [leaf.contiguous() for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.num_tokens: int = self.tensors[0].shape[-2]

    @property
    def looks(self) -> tuple[object, ...]:
        """Equal for calls that differ in the contents of their tensors alone."""
        leaves = self._leaves
        return (*self.kwargs, *(x.shape if isinstance(x, Tensor) else _value(x) for x in leaves))

    @property
    def placed(self) -> list[tuple[Tensor, int | None]]:
        """Its tensors, and which axis of each counts tokens."""
        return [(tensor, _place(tensor, self.num_tokens)) for tensor in self.tensors]

    def kind(self) -> tuple[object, ...] | None:
        """Equal for calls of one program; None if there is more than tensors and values in it."""
        length, found = self.num_tokens, list[object](self.kwargs)
        for leaf in self._leaves:
            if isinstance(leaf, Tensor):
                place = _place(leaf, length)
                shape = (None if axis == place else size for axis, size in enumerate(leaf.shape))
                found.append((leaf.dtype, leaf.device, *shape))
            elif _is_plain(leaf):
                found.append(_value(leaf))
            else:
                return None
        return tuple(found)

    def with_tensors(
        self, tensors: Iterator[Tensor], step: TracedStep
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with other tensors and another step in the same places."""

        def other(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(map(other, value))
            return next(tensors) if isinstance(value, Tensor) else value

        args = tuple(map(other, self.args))
        return args, {
            name: step if name == "spec_step" else other(value)
            for name, value in self.kwargs.items()
        }


@cache
def _operations() -> torch.library.Library:
    """Define the operations at first use; they are traced, never run."""
    library = torch.library.Library("hf_spec", "DEF")
    library.define(
        "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, float? scaling, "
        "float? softcap, int? window) -> Tensor"
    )
    library.define("multiply(Tensor states, Tensor weight, Tensor? bias) -> Tensor")

    def attended(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def multiplied(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return states.new_empty(*states.shape[:-1], weight.shape[0])

    torch.library.register_fake("hf_spec::attend", attended, lib=library)
    torch.library.register_fake("hf_spec::multiply", multiplied, lib=library)
    return library


class _OwnProducts(TorchFunctionMode):
    """Traces products as the operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_product if func is F.linear else func)(*args, **(kwargs or {}))


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    product: Tensor = torch.ops.hf_spec.multiply(input, weight, bias)
    return product


def compile_layer(layer: nn.Module, weights: Mapping[str, Tensor], call: LayerCall) -> LayerProgram:
    """The program of calls of one kind, for any layer of this kind.

    Raises:
        SourceError: if there is no C++ for some of it.
        BuildError: if it cannot be built.
        Exception: whatever the tools of PyTorch raise where they cannot trace it.
    """
    if call.kind() is None:
        raise SourceError("it is handed objects of its own")
    graph, result = _traced(layer, weights, call)
    source = layer_source(graph)
    results = tuple(isinstance(part, Tensor) for part in as_tuple(result))
    return LayerProgram(build_layer(source.text), source, results, isinstance(result, tuple))


def _traced(
    layer: nn.Module, weights: Mapping[str, Tensor], call: LayerCall
) -> tuple[fx.Graph, Any]:
    """The operations of a call, for weights and tensors of the call, and what it returns."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _operations()
    copied = _copy(layer)
    returned: list[Any] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        step = TracedStep(torch.ops.hf_spec.attend)
        args, kwargs = call.with_tensors(iter(tensors[len(weights) :]), step)
        with _OwnProducts():
            named = dict(zip(weights, tensors, strict=False))
            returned[:] = [functional_call(copied, named, args, kwargs)]
        return [one for one in as_tuple(returned[0]) if isinstance(one, Tensor)]

    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = [*((weight, None) for weight in weights.values()), *call.placed]
    inputs = [_without_contents(mode, number, *one) for number, one in enumerate(given)]
    with mode, _without_complaints():
        traced = make_fx(run)(*inputs)
    if any(node.op == "get_attr" for node in traced.graph.nodes):
        raise RuntimeError("it computes with tensors that are neither parameters nor buffers")
    _check_lengths(mode.shape_env)
    traced.graph.eliminate_dead_code()
    return traced.graph, returned[0]


@contextmanager
def _without_complaints() -> Iterator[None]:
    """What cannot be traced is no error of anybody's, and PyTorch need not say it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _check_lengths(shapes: Any) -> None:
    """Refuse a program that holds for some numbers of tokens only: nothing tells it the others.

    `shapes` has what was found out of each input's number, as in `if states.shape[1] < 8`.
    """
    from sympy import lambdify

    for guard in shapes.guards:
        numbers = list(guard.expr.free_symbols)
        holds = lambdify(numbers, guard.expr, "math")
        if not all(holds(*[length] * len(numbers)) for length in range(2, MAX_TOKENS + 1)):
            raise RuntimeError(f"it goes by the number of tokens ({guard.expr})")


def _without_contents(mode: Any, number: int, tensor: Tensor, place: int | None) -> Tensor:
    """A tensor that is a shape only, with any number of tokens along the axis `place`."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if place is not None:
        # Sizes of 1 would be taken for what they are.
        tensor = tensor.narrow(place, 0, 1).repeat_interleave(TRACED_TOKENS, place)
    sizes = [DimDynamic.DYNAMIC if a == place else DimDynamic.STATIC for a in range(tensor.ndim)]
    fake: Tensor = mode.from_tensor(
        tensor,
        static_shapes=place is None,
        source=ConstantSource(f"input{number}"),
        symbolic_context=None if place is None else StatelessSymbolicContext(sizes),
    )
    return fake


def linears_of(layer: nn.Module) -> dict[str, nn.Linear]:
    """Those of its modules that are linear layers and nothing else, by name."""
    return {name: one for name, one in layer.named_modules() if type(one) is nn.Linear}


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def as_tuple(result: Any) -> tuple[Any, ...]:
    """What a layer returns, alone or not."""
    return result if isinstance(result, tuple) else (result,)


def _copy(layer: nn.Module) -> nn.Module:
    """The same layer without forwards and hooks that it was given; other threads may run it."""
    kept: list[Any] = [*tensors_of(layer).values()]
    for module in layer.modules():
        kept += [vars(module)[name] for name in ("config", "forward") if name in vars(module)]
    copied = copy.deepcopy(layer, {id(one): one for one in kept})
    for module in copied.modules():
        module.__dict__.pop("forward", None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied


def _place(tensor: Tensor, tokens: int) -> int | None:
    """Which axis of an input counts tokens; None if none does.

    Of a single token it is where models have it: (1, T, ...) states or (T,) positions.
    """
    if tokens > 1:
        return next((axis for axis, size in enumerate(tensor.shape) if size == tokens), None)
    axis = min(1, tensor.ndim - 1)
    return axis if tensor.ndim in (1, 2, 3) and tensor.shape[axis] == 1 else None


def _is_plain(leaf: Any) -> bool:
    """Values, and lists of them, such as the indices of hidden states."""
    return isinstance(leaf, PLAIN) or (type(leaf) is list and all(map(_is_plain, leaf)))


def _value(leaf: Any) -> Any:
    if type(leaf) is list:
        return tuple(map(_value, leaf))
    return leaf if isinstance(leaf, PLAIN) else type(leaf)
