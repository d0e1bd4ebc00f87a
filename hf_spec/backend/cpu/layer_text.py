"""C++ text of a compiled layer: expressions, memory, and loops over tokens.

Statements on one token go into the newest loop over tokens. Statements on all tokens end that loop,
and values that do not depend on tokens are computed before all loops. Memory that only one loop
uses is local to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Placeholder for the number of tokens in shapes; a prime that is unlikely as another size.
TOKENS = 7919
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
# Largest array of one token on the stack, in numbers.
MAX_LOCAL = 1 << 14

POWERS = {"2.0f": "square", "3.0f": "cube", "0.5f": "std::sqrt"}
# C++ of elementwise operations, given the C++ of operands and options by name.
ELEMENTWISE: dict[Any, Callable[..., str]] = {
    aten.add.Tensor: lambda a, b, alpha=1: f"({a} + {times(b, alpha)})",
    aten.sub.Tensor: lambda a, b, alpha=1: f"({a} - {times(b, alpha)})",
    aten.rsub.Scalar: lambda a, b, alpha=1: f"({b} - {times(a, alpha)})",
    aten.mul.Tensor: "({} * {})".format,
    aten.div.Tensor: "({} / {})".format,
    aten.neg.default: "(-{})".format,
    aten.sqrt.default: "std::sqrt({})".format,
    aten.rsqrt.default: "(1.0f / std::sqrt({}))".format,
    aten.exp.default: "exp_of({})".format,
    aten.sigmoid.default: "sigmoid_of({})".format,
    aten.silu.default: "silu_of({})".format,
    aten.tanh.default: "tanh_of({})".format,
    aten.relu.default: "std::max({}, 0.0f)".format,
    aten.gelu.default: lambda a, approximate="none": f"gelu_{approximate}_of({a})",
    aten.pow.Tensor_Scalar: lambda a, power: f"{POWERS[power]}({a})",
    aten._to_copy.default: lambda a, **_: a,
    aten.clone.default: lambda a, **_: a,
}
# Operations that change shape and strides only.
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.select.int,
    aten.expand.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.detach.default,
    aten.alias.default,
}

# Fewer tokens run on one thread.
MIN_TOKENS = 8
HEAD = """#include "layer.h"

extern "C" void run(const void* const* constants, const Weight* weights,
                    const Attention* attention, const Call* call) {
const void* const* const inputs = call->inputs;
void* const* const outputs = call->outputs;
const int64_t tokens = call->tokens;
const int threads = call->threads;"""


class SourceError(RuntimeError):
    """An operation of a layer cannot be written in C++."""


@dataclass(frozen=True)
class Leaf:
    """Memory of a value: an array, and a meta tensor with the shape and strides in it."""

    array: str
    form: Tensor

    @property
    def at(self) -> str:
        """C++ of one number of the current token, indexed by loop variables."""
        sizes, strides = self.form.shape, self.form.stride()
        terms = [
            f"{strides[axis]} * i{axis}"
            for axis in inner_axes(sizes)
            if sizes[axis] > 1 and strides[axis]
        ]
        return f"{self.array}[{' + '.join([str(self.form.storage_offset()), *terms])}]"

    @property
    def address(self) -> str:
        """C++ of the address of the first token's numbers."""
        return f"all_{self.array} + {self.form.storage_offset()}"

    def expand(self, shape: Sequence[int]) -> Leaf:
        """Broadcast to a larger shape."""
        return Leaf(self.array, self.form.expand(shape))


@dataclass(frozen=True)
class Value:
    """Result of an operation: an expression of numbers in memory, rounded to a dtype."""

    # C++ with a `{}` for the number of each leaf.
    code: str
    # Broadcast to the value's shape, which has `TOKENS` for the number of tokens.
    leaves: tuple[Leaf, ...]
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Leaf, dtype: torch.dtype) -> Value:
        """Return the value of numbers in memory."""
        return cls("{}", (leaf,), leaf.form.shape, dtype)

    @property
    def leaf(self) -> Leaf | None:
        """The value's memory; None for other expressions."""
        return self.leaves[0] if self.code == "{}" else None

    @property
    def expression(self) -> str:
        """C++ of one number of the current token, indexed by loop variables."""
        return self.code.format(*(f"number({leaf.at})" for leaf in self.leaves))

    def expand(self, shape: torch.Size) -> Value:
        """Broadcast to a larger shape."""
        leaves = tuple(leaf.expand(shape) for leaf in self.leaves)
        return Value(self.code, leaves, shape, self.dtype)

    def cast(self, dtype: torch.dtype) -> Value:
        """Return the value in another dtype."""
        exact = dtype in (torch.float32, self.dtype)
        code = self.code if exact else f"rounded({self.code})"
        return Value(code, self.leaves, self.shape, dtype)


@dataclass
class Array:
    """Memory of a compiled layer: `size` numbers, or `size` per token if `by_token`."""

    dtype: torch.dtype
    size: int
    by_token: bool
    # C++ of the address in the caller's memory; empty for scratch memory.
    given: str = ""
    # Indices of the parts of the source that use it.
    used: set[int] = field(default_factory=set)

    @property
    def kind(self) -> str:
        """C++ type of the numbers."""
        return TYPES[self.dtype]

    @property
    def is_local(self) -> bool:
        """True if a single loop over tokens uses it, so that it fits on the stack."""
        small = self.size <= MAX_LOCAL
        return self.by_token and not self.given and small and len(self.used) == 1


def combined(code: Callable[..., str], operands: Sequence[Value | float], **options: Any) -> Value:
    """Combine values and numbers in a float32 expression."""
    values = [operand for operand in operands if isinstance(operand, Value)]
    shape = torch.broadcast_shapes(*(value.shape for value in values))
    codes = [part.code if isinstance(part, Value) else constant(part) for part in operands]
    leaves = tuple(leaf.expand(shape) for value in values for leaf in value.leaves)
    return Value(code(*codes, **options), leaves, shape, torch.float32)


def token_axis(shape: torch.Size) -> int | None:
    """Return the axis that counts tokens, if there is one."""
    return shape.index(TOKENS) if TOKENS in shape else None


def inner_axes(shape: torch.Size) -> list[int]:
    """Return all axes except the one of tokens."""
    return [axis for axis, size in enumerate(shape) if size != TOKENS]


def loops(shape: torch.Size, axes: Sequence[int], clause: str | None = None) -> list[str]:
    """Return loops over axes; with a `clause`, even an empty one, the innermost is `omp simd`."""
    axes = [axis for axis in axes if shape[axis] > 1]
    lines = [f"for (int64_t i{axis} = 0; i{axis} < {shape[axis]}; ++i{axis})" for axis in axes]
    if lines and clause is not None:
        lines.insert(-1, f"#pragma omp simd {clause}")
    return lines


def times(code: str, factor: float) -> str:
    """Return the C++ of a product with a number."""
    return code if factor == 1 else f"({code} * {constant(factor)})"


def constant(number: float) -> str:
    """Return the C++ of a number."""
    if not math.isfinite(number):
        raise SourceError(f"there is no C++ for {number}")
    return f"{float(number)!r}f" if number >= 0 else f"({float(number)!r}f)"


class LayerText:
    """C++ of a compiled layer under construction."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        # Statements that depend on no token; then loops over tokens, each a list of statements, and
        # statements between them.
        self._before: list[str] = []
        self._parts: list[list[str] | str] = []

    def stored(self, value: Value) -> Value:
        """Return the value, written to new memory."""
        to = self.memory(value.shape, value.dtype)
        self.assign(to, value)
        return Value.of(to, value.dtype)

    def in_memory(self, value: Value, fits: Callable[[Tensor], bool]) -> Leaf:
        """Return memory from which a kernel can read a value; write it to new memory if needed."""
        leaf = value.leaf
        if leaf is None or self._arrays[leaf.array].dtype != value.dtype or not fits(leaf.form):
            return self.stored(value).leaves[0]
        return leaf

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Leaf:
        """Allocate memory in which the numbers of each token are contiguous."""
        axis = token_axis(shape)
        others = [size for index, size in enumerate(shape) if index != axis]
        form = torch.empty(others if axis is None else [TOKENS, *others], device="meta")
        return self.array(form if axis is None else form.movedim(0, axis), dtype)

    def array(self, form: Tensor, dtype: torch.dtype, name: str = "", given: str = "") -> Leaf:
        """Declare an array with the strides of `form`, in the caller's memory if it is `given`."""
        name = name or f"b{len(self._arrays)}"
        by_token = TOKENS in form.shape
        size = form.numel() // (TOKENS if by_token else 1)
        self._arrays[name] = Array(dtype, size, by_token, given)
        return Leaf(name, form)

    def assign(self, to: Leaf, value: Value) -> None:
        """Write a value to memory."""
        shape = to.form.shape
        if shape.numel():
            wide = value.expand(shape)
            lines = loops(shape, inner_axes(shape), "")
            self.for_each(
                "\n".join([*lines, f"narrow({wide.expression}, {to.at});"]), [to, *wide.leaves]
            )

    def for_each(self, line: str, used: Sequence[Leaf]) -> None:
        """Add a statement to the newest loop over tokens; before all loops if no token is used."""
        if not any(self._arrays[leaf.array].by_token for leaf in used):
            self._before.append(line)
            return
        if not self._parts or isinstance(self._parts[-1], str):
            self._parts.append([])
        self._parts[-1].append(line)  # type: ignore[union-attr]
        self._use(used)

    def for_all(self, line: str, used: Sequence[Leaf]) -> None:
        """Add a statement on all tokens after the newest loop."""
        self._parts.append(line)
        self._use(used)

    def _use(self, used: Sequence[Leaf]) -> None:
        for leaf in used:
            self._arrays[leaf.array].used.add(len(self._parts) - 1)

    def whole(self) -> str:
        """Return the C++ source."""
        lines = [HEAD, *self._given(), *self._scratch()]
        lines += [f"auto* const {n} = all_{n};" for n, a in self._arrays.items() if not a.by_token]
        lines += self._before
        for index, part in enumerate(self._parts):
            lines += [part] if isinstance(part, str) else self._loop(index, part)
        return "\n".join([*lines, "}", ""])

    def _given(self) -> list[str]:
        lines = []
        for name, array in self._arrays.items():
            if array.given:
                const = "" if array.given.startswith("outputs") else "const "
                kind = f"{const}{array.kind}*"
                lines.append(f"{kind} const all_{name} = static_cast<{kind}>({array.given});")
        return lines

    def _scratch(self) -> list[str]:
        # One allocation for all.
        lines, arrays, end = [], [], "0"
        for name, array in self._arrays.items():
            if array.given or array.is_local:
                continue
            count = f"{array.size} * tokens" if array.by_token else str(array.size)
            lines.append(f"const int64_t at_{name} = {end};")
            arrays.append(
                f"auto* const all_{name} = reinterpret_cast<{array.kind}*>(memory + at_{name});"
            )
            end = f"at_{name} + aligned({count} * sizeof({array.kind}))"
        return [*lines, f"char* const memory = scratch({end});", *arrays]

    def _loop(self, index: int, statements: Sequence[str]) -> list[str]:
        lines = [
            "#pragma omp parallel for num_threads(threads) schedule(static) "
            f"if (threads > 1 && tokens >= {MIN_TOKENS})",
            "for (int64_t token = 0; token < tokens; ++token) {",
        ]
        for name, array in self._arrays.items():
            if array.by_token and index in array.used:
                local = f"alignas(64) {array.kind} {name}[{array.size}];"
                shared = f"auto* const {name} = all_{name} + token * {array.size};"
                lines.append(local if array.is_local else shared)
        return [*lines, *statements, "}"]
