"""C++ of a decoder layer, generated from its traced graph.

Tokens of a decoder layer interact in attention only. All other operations run token by token on
vectors of known size, in a loop for every result that is used more than once, reduced, multiplied
by a weight or passed to attention. Operations in between become expressions in these loops, and
views become other strides. The result of a token has the same bits in every batch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hf_spec.backend.cpu.layer_text import (
    ELEMENTWISE,
    TOKENS,
    TYPES,
    VIEWS,
    LayerText,
    Leaf,
    SourceError,
    Value,
    aten,
    combined,
    constant,
    inner_axes,
    loops,
    token_axis,
)

# Operations on sizes; `TOKENS` is the placeholder for the number of tokens.
SIZES: dict[Any, Callable[..., int]] = {
    aten.sym_size.int: lambda value, axis: value.shape[axis],
    aten.sym_numel.default: lambda value: value.shape.numel(),
    operator.mul: operator.mul,
    operator.floordiv: operator.floordiv,
}


@dataclass(frozen=True)
class LinearPlan:
    """A linear layer: the index of its weight among the inputs, its rows per token, their dtype."""

    weight: int
    rows: int
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionPlan:
    """Attention of a layer; `keys` and `values` are the number of heads and the head size."""

    # As passed to `TracedStep.attend`.
    window: int | None
    dtype: torch.dtype
    keys: tuple[int, int]
    values: tuple[int, int]


@dataclass(frozen=True)
class LayerSource:
    """C++ of a layer and the order of its arguments.

    Attributes:
        text: the source, which defines `run`.
        linears: its linear layers, in the order of its table of weights.
        attention: None in a layer without attention.
        outputs: shapes, with `TOKENS` for the number of tokens, and dtypes.
    """

    text: str
    linears: tuple[LinearPlan, ...]
    attention: AttentionPlan | None
    outputs: tuple[tuple[torch.Size, torch.dtype], ...]


def layer_source(graph: fx.Graph, num_constants: int = 0) -> LayerSource:
    """Generate the C++ of a traced graph.

    All sizes but the number of tokens are constant. `hf_spec.multiply`, `hf_spec.change` and
    `hf_spec.attend` are linear layers, their low-rank changes, and attention. The first
    `num_constants` inputs are the same in every call.

    Raises:
        SourceError: if an operation cannot be written in C++.
    """
    text = LayerText()
    writer = _Writer(text, num_constants)
    outputs: Sequence[Value] = ()
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        writer.add_input(index, node)
    for node in graph.nodes:
        if node.op == "call_function":
            writer.compute(node)
        elif node.op == "output":
            outputs = [writer.add_output(*output) for output in enumerate(node.args[0])]
    shapes = tuple((value.shape, value.dtype) for value in outputs)
    linears = tuple(writer.linears)
    return LayerSource(text.whole(), linears, writer.attention, shapes)


class _Writer:
    """Writes the nodes of a graph in order."""

    def __init__(self, text: LayerText, num_constants: int) -> None:
        self._num_constants = num_constants
        self.linears: list[LinearPlan] = []
        self.attention: AttentionPlan | None = None
        self._values: dict[fx.Node, Any] = {}
        # Index of inputs that depend on no token and are contiguous.
        self._weights: dict[fx.Node, int] = {}
        # Index of inputs of truth values, one per token.
        self._gates: dict[fx.Node, int] = {}
        self._text = text

    def add_input(self, index: int, node: fx.Node) -> None:
        """Declare an input: contiguous numbers of all tokens, or a tensor that depends on none."""
        tensor: Tensor = node.meta["val"]
        shape = torch.Size(map(_size, tensor.shape))
        axis = token_axis(shape)
        if axis is None and tensor.is_contiguous():
            self._weights[node] = index
        if tensor.dtype == torch.bool and shape == (TOKENS,):
            self._gates[node] = index
        contiguous = axis is None or shape[:axis].numel() == 1
        if tensor.dtype not in TYPES or not contiguous:
            # An error is raised where it is used.
            self._values[node] = None
            return
        form = torch.empty(shape, device="meta")
        if axis is None:
            form = form.as_strided(shape, tensor.stride())
        leaf = self._text.array(form, tensor.dtype, f"in{index}", self._argument(index))
        self._values[node] = Value.of(leaf, tensor.dtype)

    def add_output(self, index: int, node: fx.Node) -> Value:
        value: Value = self._get(node)
        axis = token_axis(value.shape)
        if axis is None or value.shape[:axis].numel() > 1:
            raise SourceError("it returns something else than states of tokens")
        form = torch.empty(value.shape, device="meta")
        self._text.assign(
            self._text.array(form, value.dtype, f"out{index}", f"outputs[{index}]"), value
        )
        return value

    def compute(self, node: fx.Node) -> None:
        """Write an operation; a result that is used more than once goes to memory."""
        value = self._called(node)
        if isinstance(value, Value) and value.leaf is None and len(node.users) > 1:
            value = self._text.stored(value)
        self._values[node] = value

    def _called(self, node: fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = node.args, node.kwargs
        if target is operator.getitem:
            return self._get(args[0])[args[1]]
        if target in SIZES:
            return SIZES[target](*map(self._resolve, args))
        if target in VIEWS:
            return self._viewed(target, *args)
        if target in ELEMENTWISE and (dtype := node.meta["val"].dtype) in TYPES:
            return self._computed(target, args, kwargs, dtype)
        if (write := _METHODS.get(str(target))) is not None:
            return write(self, *args, **kwargs)
        raise SourceError(f"there is no C++ for {target}")

    def _get(self, node: Any) -> Any:
        value = self._values[node]
        if value is None:
            raise SourceError(f"there is no C++ for numbers like those of {node}")
        return value

    def _resolve(self, arg: Any) -> Any:
        """Return an argument, with nodes replaced by their values, such as the number of tokens."""
        if isinstance(arg, (list, tuple)):
            return [self._resolve(part) for part in arg]
        return self._get(arg) if isinstance(arg, fx.Node) else arg

    def _viewed(self, target: Any, arg: Any, *rest: Any) -> Value | list[Value]:
        value, rest = self._get(arg), tuple(map(self._resolve, rest))
        try:
            forms = [target(leaf.form, *rest) for leaf in value.leaves]
        except RuntimeError:
            # The strides do not allow this view; write the value to memory first.
            value = self._text.stored(value)
            forms = [target(leaf.form, *rest) for leaf in value.leaves]
        if isinstance(forms[0], Tensor):
            return self._with_forms(value, forms)
        return [self._with_forms(value, parts) for parts in zip(*forms, strict=True)]

    @staticmethod
    def _with_forms(value: Value, forms: Sequence[Tensor]) -> Value:
        shape = forms[0].shape
        if (TOKENS in value.shape) != (TOKENS in shape):
            raise SourceError("it mixes tokens with something else, or leaves some out")
        leaves = [Leaf(leaf.array, form) for leaf, form in zip(value.leaves, forms, strict=True)]
        return Value(value.code, tuple(leaves), shape, value.dtype)

    def _computed(
        self, target: Any, args: Sequence[Any], options: Any, dtype: torch.dtype
    ) -> Value:
        operands = [self._get(arg) if isinstance(arg, fx.Node) else arg for arg in args]
        try:
            result = combined(ELEMENTWISE[target], operands, **options)
        except KeyError as error:
            raise SourceError(f"there is no C++ for {target} with {error}") from error
        if result.leaf is not None:
            # A copy, which is rounded only if the operand was not.
            return Value(result.code, result.leaves, result.shape, operands[0].dtype).cast(dtype)
        return result.cast(dtype)

    def _mean(self, arg: fx.Node, axes: Sequence[int], keep: bool = False) -> Value:
        return self._reduced(self._get(arg), axes, keep, is_mean=True)

    def _sum(self, arg: fx.Node, axes: Sequence[int], keep: bool = False) -> Value:
        return self._reduced(self._get(arg), axes, keep)

    def _reduced(
        self, value: Value, axes: Sequence[int], keep: bool, is_mean: bool = False
    ) -> Value:
        rank, shape = len(value.shape), value.shape
        reduced = {axis % rank for axis in axes}
        if token_axis(shape) in reduced:
            raise SourceError("it sums over tokens")
        small = torch.Size(1 if axis in reduced else size for axis, size in enumerate(shape))
        to = self._text.memory(small, value.dtype)
        number = math.prod(shape[axis] for axis in reduced)
        inner = inner_axes(shape)
        lines = [
            *loops(shape, [axis for axis in inner if axis not in reduced]),
            "{ float sum = 0;",
            *loops(shape, [axis for axis in inner if axis in reduced], "reduction(+ : sum)"),
            f"sum += {value.expression};",
            f"narrow(sum / {number}.0f, {to.at}); }}" if is_mean else f"narrow(sum, {to.at}); }}",
        ]
        self._text.for_each("\n".join(lines), [to, *value.leaves])
        form = to.form
        for axis in () if keep else sorted(reduced, reverse=True):
            form = form.squeeze(axis)
        return Value.of(Leaf(to.array, form), value.dtype)

    def _normed(
        self, arg: fx.Node, sizes: Sequence[int], weight: Any, bias: Any, eps: float
    ) -> tuple[Value, None, None]:
        # PyTorch computes it in float32.
        value, axes = self._get(arg), range(-len(sizes), 0)
        states = self._text.stored(value).cast(torch.float32)
        mean = self._reduced(states, axes, keep=True, is_mean=True)
        centered = self._text.stored(combined("({} - {})".format, [states, mean]))
        squares = combined("square({})".format, [centered])
        variance = self._reduced(squares, axes, keep=True, is_mean=True)
        result = combined(
            f"({{}} / std::sqrt({{}} + {constant(eps)}))".format, [centered, variance]
        )
        for code, part in (("({} * {})", weight), ("({} + {})", bias)):
            if part is not None:
                result = combined(code.format, [result, self._get(part)])
        return result.cast(value.dtype), None, None

    def _joined(self, args: Sequence[fx.Node], axis: int = 0) -> Value:
        return self._concatenated([self._get(arg) for arg in args], axis)

    def _stacked(self, args: Sequence[fx.Node], axis: int = 0) -> Value:
        values = [self._viewed(aten.unsqueeze.default, arg, axis) for arg in args]
        return self._concatenated(values, axis)

    def _concatenated(self, values: Sequence[Any], axis: int) -> Value:
        shape = list(values[0].shape)
        axis %= len(shape)
        if shape[axis] == TOKENS:
            raise SourceError("it adds tokens")
        shape[axis] = sum(value.shape[axis] for value in values)
        to, begin = self._text.memory(torch.Size(shape), values[0].dtype), 0
        for value in values:
            size = value.shape[axis]
            self._text.assign(Leaf(to.array, to.form.narrow(axis, begin, size)), value)
            begin += size
        return Value.of(to, values[0].dtype)

    def _multiplied(self, arg: fx.Node, weight: fx.Node, bias: fx.Node | None) -> Value:
        states, outputs = self._get(arg), int(weight.meta["val"].shape[0])
        # Two codes of a 4-bit weight are in a byte.
        inputs = states.shape[-1]
        tokens, number = token_axis(states.shape), self._weights.get(weight)
        added = self._input(bias)
        if tokens is None or number is None or (bias is not None and added is None):
            raise SourceError("it multiplies something else than states with weights")
        leaf = self._text.in_memory(states, lambda form: form.movedim(tokens, 0).is_contiguous())
        shape = torch.Size([*states.shape[:-1], outputs])
        to, index = self._text.memory(shape, states.dtype), len(self.linears)
        rows = shape.numel() // outputs // TOKENS
        self.linears.append(LinearPlan(number, rows, states.dtype))
        pointer = "nullptr" if added is None else self._argument(added)
        self._text.for_all(
            f"multiply(weights[{index}], {leaf.address}, {pointer}, {to.address}, "
            f"{rows} * tokens, {inputs}, {outputs}, threads);",
            [leaf, to],
        )
        return Value.of(to, states.dtype)

    def _changed(
        self, result: fx.Node, states: fx.Node, down: fx.Node, up: fx.Node, gate: fx.Node
    ) -> Value:
        value, source = self._get(result), self._get(states)
        (rank, inputs), outputs = down.meta["val"].shape, value.shape[-1]
        numbers = self._weights.get(down), self._weights.get(up), self._gates.get(gate)
        dtypes = {value.dtype, source.dtype, down.meta["val"].dtype, up.meta["val"].dtype}
        fits = inputs == source.shape[-1] and up.meta["val"].shape == (rank, outputs)
        fits = fits and value.shape.numel() == outputs * TOKENS and len(dtypes) == 1
        given = [self._argument(number) for number in numbers if number is not None]
        if not fits or len(given) < len(numbers) or value.leaf is None:
            raise SourceError("it changes something else than one row of each token")
        # Only the change reads the result of the linear layer.
        to, leaf = value.leaf, self._text.in_memory(source, lambda form: form.is_contiguous())
        self._text.for_all(
            f"change<{rank}>({leaf.address}, {', '.join(given)}, {to.address}, tokens, {inputs}, "
            f"{outputs}, threads);",
            [leaf, to],
        )
        return value

    def _attended(  # noqa: PLR0913 - the arguments of attention
        self,
        query: fx.Node,
        key: fx.Node,
        value: fx.Node,
        sinks: fx.Node | None,
        scaling: float | None,
        softcap: float | None,
        window: int | None,
    ) -> Value:
        values = [self._get(node) for node in (query, key, value)]
        if self.attention is not None or any(token_axis(part.shape) != 2 for part in values):
            raise SourceError("it attends twice, or to something else than tokens")
        leaves = [self._text.in_memory(part, lambda form: form.stride(-1) == 1) for part in values]
        (_, heads, _, width), (_, kv_heads, _, _), (_, _, _, value_width) = (
            part.shape for part in values
        )
        dtype = values[0].dtype
        self.attention = AttentionPlan(window, dtype, (kv_heads, width), (kv_heads, value_width))
        to = self._text.memory(torch.Size([1, TOKENS, heads, value_width]), dtype)
        added = []
        if sinks is not None:
            logits = self._get(sinks).cast(torch.float32)
            added = [self._text.in_memory(logits, lambda form: form.is_contiguous())]
        # Addresses, and strides between tokens and between heads of (1, H, T, D).
        args = [f"{a.address}, {a.form.stride(2)}, {a.form.stride(1)}" for a in leaves]
        scale = constant(width**-0.5 if scaling is None else scaling)
        store = "store(*attention, attention->"
        self._text.for_all(
            f"{store}keys, call->slot_mapping, {args[1]}, tokens, {kv_heads}, {width});\n"
            f"{store}values, call->slot_mapping, {args[2]}, tokens, {kv_heads}, {value_width});\n"
            f"attend(*attention, call->layout, {args[0]}, {to.address}, "
            f"{added[0].address if added else 'nullptr'}, {scale}, {constant(softcap or 0.0)}, "
            f"{heads}, {kv_heads}, {width}, {value_width}, threads);",
            [*leaves, *added, to],
        )
        return Value.of(to, dtype)

    def _argument(self, index: int) -> str:
        constants = self._num_constants
        return f"constants[{index}]" if index < constants else f"inputs[{index - constants}]"

    def _input(self, node: fx.Node | None) -> int | None:
        """Return the index of the input that a node is, whole and contiguous; None for others."""
        leaf = None if node is None else self._get(node).leaf
        whole = leaf is not None and leaf.array.startswith("in") and leaf.form.is_contiguous()
        return int(leaf.array.removeprefix("in")) if leaf is not None and whole else None


_METHODS: dict[str, Callable[..., Any]] = {
    "aten.mean.dim": _Writer._mean,
    "aten.sum.dim_IntList": _Writer._sum,
    "aten.cat.default": _Writer._joined,
    "aten.stack.default": _Writer._stacked,
    "aten.native_layer_norm.default": _Writer._normed,
    "hf_spec.multiply.default": _Writer._multiplied,
    "hf_spec.change.default": _Writer._changed,
    "hf_spec.attend.default": _Writer._attended,
}


def _size(size: Any) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else TOKENS
