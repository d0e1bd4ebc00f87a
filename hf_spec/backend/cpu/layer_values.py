"""Values in the C++ of a decoder layer: expressions, memory, loops.

Code is written for one token, whose vectors have known sizes.
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
