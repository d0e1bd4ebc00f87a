"""A decoder layer as a program: traced on tensors without contents, compiled by inductor.

Inductor, the compiler of PyTorch, joins what lies between products: norms, rotations, sums.
Products and attention are operations that it does not know, which run what they run outside:
packed weights, and `tree_attention` on the rows' storage. Weights are inputs, so that layers of one
kind share a program. The tools are private ones of PyTorch, as they are wherever code is traced
that is not compiled as a whole; whatever they raise is a reason to run a layer as it is.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, compress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from hf_spec.execution.attention import NOT_SAID, PackedStep, TracedStep, tree_attention
from hf_spec.execution.cpu_linear import joint_product

# Weights and inputs of a layer -> what its forward returns.
Program = Callable[[Sequence[Tensor]], Any]
PLAIN = (bool, int, float, str, type(None))
# Larger steps, prompts above all, take their time in products; they run as they come.
MAX_TOKENS = 64
# Larger weights together are no faster than one by one (measured).
MAX_JOINT_ELEMENTS = 1 << 20
# Beside these a module has what its class computes with, and where it is in the model.
_OF_EVERY_MODULE = {*vars(nn.Module()), "layer_idx", "forward"}


class LayerCall:
    """What a layer is called with: values, tensors, pairs of them, and a `spec_step`."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args = args
        self.kwargs = kwargs
        self._leaves: list[Any] = []
        for value in (*args, *kwargs.values()):
            if type(value) is tuple:
                self._leaves += value
            elif type(value) is not PackedStep:
                self._leaves.append(value)

    @property
    def looks(self) -> tuple[object, ...]:
        """Equal for calls that differ in the contents of their tensors alone."""
        leaves = self._leaves
        return (*self.kwargs, *(x.shape if isinstance(x, Tensor) else _value(x) for x in leaves))

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, contiguous as programs expect them."""
        found = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        return [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in found]

    @property
    def num_tokens(self) -> int:
        """T of the hidden states (1, T, width), which come first."""
        return self.tensors[0].shape[-2]

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
        return length > 1, *found

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


class _Outside(threading.local):
    """What the layer that this thread runs as a program computes outside of it."""

    step: PackedStep | None = None
    attention: nn.Module | None = None
    products: Mapping[int, nn.Linear] = MappingProxyType({})


_outside = _Outside()


@contextmanager
def outside(
    step: PackedStep, attention: nn.Module, products: Mapping[int, nn.Linear]
) -> Iterator[None]:
    """Programs attend by `attention` in a step; products are those of modules, by id of weight."""
    here = _outside
    here.step, here.attention, here.products = step, attention, products
    try:
        yield
    finally:
        here.step, here.attention, here.products = None, None, _Outside.products


def _attend(  # noqa: PLR0913 - what attention is told
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    assert _outside.attention is not None, "programs run inside `outside`"
    said: dict[str, Any] = {} if window == NOT_SAID else {"sliding_window": window}
    said |= {"scaling": scaling, "softcap": softcap, "s_aux": sinks, "spec_step": _outside.step}
    return tree_attention(_outside.attention, query, key, value, None, **said)[0].contiguous()


def _multiply(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Products of the same states side by side; several are those of modules."""
    known = _outside.products
    if len(weights) > 1:
        return joint_product([known[id(weight)] for weight in weights], states)
    linear: Any = known.get(id(weights[0]))
    return linear.forward(states) if linear else F.linear(states, weights[0], biases[0])


@cache
def _operations() -> torch.library.Library:
    """Define the operations at first use."""
    library = torch.library.Library("hf_spec", "DEF")
    library.define(
        "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, float? scaling, "
        "float? softcap, int? window) -> Tensor"
    )
    library.define("multiply(Tensor states, Tensor[] weights, Tensor?[] biases) -> Tensor")
    library.impl("attend", _attend, "CPU")
    library.impl("multiply", _multiply, "CPU")

    def attended(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def multiplied(states: Tensor, weights: Sequence[Tensor], biases: object) -> Tensor:
        return states.new_empty(*states.shape[:-1], sum(weight.shape[0] for weight in weights))

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
    product: Tensor = torch.ops.hf_spec.multiply(input, [weight], [bias])
    return product


def _join_products(graph: torch.fx.Graph, linears: Collection[torch.fx.Node]) -> None:
    """Let one operation compute small products of the same states; `linears` are weights."""
    by_states: dict[Any, list[Any]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is torch.ops.hf_spec.multiply.default:
            states, [weight], _ = node.args
            if weight in linears:
                by_states[states].append(node)
    for states, products in by_states.items():
        weights, biases = ([one.args[place][0] for one in products] for place in (1, 2))
        shapes = [weight.meta["val"].shape for weight in weights]
        elements = sum(shape.numel() for shape in shapes)
        if len(products) < 2 or elements > MAX_JOINT_ELEMENTS:
            continue
        with graph.inserting_before(products[0]):
            given = (states, weights, biases)
            joint = graph.call_function(torch.ops.hf_spec.multiply.default, given)
            ends = accumulate(shape[0] for shape in shapes)
            for product, shape, end in zip(products, shapes, ends, strict=True):
                own = (joint, -1, end - shape[0], end)
                part = graph.call_function(torch.ops.aten.slice.Tensor, own)
                product.replace_all_uses_with(part)
        for product in products:
            graph.erase_node(product)


def compile_layer(layer: nn.Module, weights: Mapping[str, Tensor], call: LayerCall) -> Program:
    """The program of calls of one kind, for any layer of this kind.

    Raises:
        Exception: whatever the tools of PyTorch raise where they cannot trace or compile it.
    """
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
    given, length = [*weights.values(), *call.tensors], call.num_tokens
    places = [None] * len(weights) + [_place(tensor, length) for tensor in call.tensors]
    inputs = [
        _without_contents(mode, n, *pair) for n, pair in enumerate(zip(given, places, strict=True))
    ]
    with mode:
        graph = make_fx(run)(*inputs)
    if any(node.op == "get_attr" for node in graph.graph.nodes):
        raise RuntimeError("it computes with tensors that are neither parameters nor buffers")
    linears = {f"{name}.weight" for name in linears_of(layer)}
    is_linear = [name in linears for name in weights]
    _join_products(graph.graph, list(compress(graph.graph.find_nodes(op="placeholder"), is_linear)))
    graph.recompile()
    compiled = _lower(graph, inputs)
    _check_lengths(mode.shape_env)
    result = as_tuple(returned[0])
    one = not isinstance(returned[0], tuple)
    is_tensor = [isinstance(part, Tensor) for part in result]

    def program(tensors: Sequence[Tensor]) -> Any:
        found = iter(compiled(*tensors))
        parts = tuple(next(found) if tensor else None for tensor in is_tensor)
        return parts[0] if one else parts

    return program


def _check_lengths(shapes: Any) -> None:
    """Refuse a program that holds for some numbers of tokens only: nothing tells it the others.

    `shapes` has what was found out of each input's number, as in `if states.shape[1] < 8`.
    """
    for guard in shapes.guards:
        for length in range(2, MAX_TOKENS + 1):
            if not guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, length)):
                raise RuntimeError(f"it goes by the number of tokens ({guard.expr})")


def _lower(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    from torch._functorch.config import patch as patch_functorch
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.config import patch as patch_inductor

    # What is put around a program by default, for autograd and aliases, takes longer than its
    # kernels; this has neither, and its results are compared with the layer's own.
    inner: list[Any] = []

    def lower(*args: Any, **kwargs: Any) -> Any:
        inner.append(compile_fx_inner(*args, **kwargs))
        return inner[-1]

    # No pool of processes that stay: a program has a handful of kernels. Inductor keeps what it
    # compiles on disk; a second cache, around it, would not ask for it.
    inductor = patch_inductor(compile_threads=1, size_asserts=False)
    with inductor, patch_functorch(enable_autograd_cache=False):
        compile_fx(graph, inputs, inner_compile=lower)
    [compiled] = inner
    return lambda *tensors: compiled(list(tensors))


def _without_contents(mode: Any, number: int, tensor: Tensor, place: int | None) -> Tensor:
    """A tensor that is a shape only, any number standing at `place`."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

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


def kind_of(layer: nn.Module) -> object:
    """Equal for layers that compute the same with other weights, as far as can be seen."""

    def attributes(module: nn.Module) -> list[tuple[str, Any]]:
        own = sorted(set(vars(module)) - _OF_EVERY_MODULE)
        return [(name, _content(vars(module)[name])) for name in own]

    modules = [(name, type(m), tuple(attributes(m))) for name, m in layer.named_modules()]
    tensors = tensors_of(layer).items()
    return tuple(modules), tuple((n, t.dtype, t.shape, t.stride()) for n, t in tensors)


def _content(value: Any) -> Any:
    """What a layer may compute with, such as scales and names of adapters; else the type."""
    if isinstance(value, PreTrainedConfig):
        return _content(vars(value))
    if isinstance(value, dict):
        return tuple((key, _content(one)) for key, one in value.items() if key != "layer_idx")
    if isinstance(value, (list, tuple)):
        return tuple(map(_content, value))
    return _value(value)


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
    """Which axis of an input counts tokens; None if none does, or there is one token."""
    return next((axis for axis, size in enumerate(tensor.shape) if size == tokens > 1), None)


def _is_plain(leaf: Any) -> bool:
    """Values, and lists of them, such as the indices of hidden states."""
    return isinstance(leaf, PLAIN) or (type(leaf) is list and all(map(_is_plain, leaf)))


def _value(leaf: Any) -> Any:
    if type(leaf) is list:
        return tuple(map(_value, leaf))
    return leaf if isinstance(leaf, PLAIN) else type(leaf)
