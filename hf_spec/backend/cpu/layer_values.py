"""Numbers of a decoder layer as C++ has them: expressions, where they lie, loops over them.

Everything is seen for one token: of its vectors all sizes are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Stands for the number of tokens in shapes; a prime that no other size is likely to be.
TOKENS = 7919
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
# Numbers that a token may have on the stack, in one array.
MAX_LOCAL = 1 << 14

POWERS = {"2.0f": "square", "3.0f": "cube", "0.5f": "std::sqrt"}
# Operations on numbers, of operands, and of options by name.
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
# The same numbers in another shape, if their strides allow it.
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
    """A layer has something in it that there is no C++ for; the message says what."""


@dataclass(frozen=True)
class Leaf:
    """Numbers in memory: of which array, and where in it, as a tensor without contents."""

    array: str
    form: Tensor

    @property
    def at(self) -> str:
        """The number of the token at hand, by the variables of loops over its axes."""
        sizes, strides = self.form.shape, self.form.stride()
        terms = [
            f"{strides[axis]} * i{axis}"
            for axis in inner_axes(sizes)
            if sizes[axis] > 1 and strides[axis]
        ]
        return f"{self.array}[{' + '.join([str(self.form.storage_offset()), *terms])}]"

    @property
    def address(self) -> str:
        """Where the numbers of the first token begin."""
        return f"all_{self.array} + {self.form.storage_offset()}"

    def expand(self, shape: Sequence[int]) -> Leaf:
        """The same numbers for a larger shape."""
        return Leaf(self.array, self.form.expand(shape))


@dataclass(frozen=True)
class Value:
    """What an operation gives: an expression of numbers in memory.

    Attributes:
        code: with a `{}` for the number of each leaf.
        leaves: all of the value's own shape.
        shape: with `TOKENS` for the number of tokens.
        dtype: what it was rounded to.
    """

    code: str
    leaves: tuple[Leaf, ...]
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Leaf, dtype: torch.dtype) -> Value:
        """Numbers as they lie in memory."""
        return cls("{}", (leaf,), leaf.form.shape, dtype)

    @property
    def leaf(self) -> Leaf | None:
        """The numbers themselves, if they lie in memory."""
        return self.leaves[0] if self.code == "{}" else None

    @property
    def expression(self) -> str:
        """The number of the token at hand, by the variables of loops over its axes."""
        return self.code.format(*(f"number({leaf.at})" for leaf in self.leaves))

    def expand(self, shape: torch.Size) -> Value:
        """The same numbers for a larger shape."""
        return Value(self.code, tuple(one.expand(shape) for one in self.leaves), shape, self.dtype)

    def cast(self, dtype: torch.dtype) -> Value:
        """The same numbers in another dtype."""
        exact = dtype in (torch.float32, self.dtype)
        code = self.code if exact else f"rounded({self.code})"
        return Value(code, self.leaves, self.shape, dtype)


@dataclass
class Array:
    """Memory of a program.

    Attributes:
        size: how many numbers it has for each token, or in all.
        by_token: whether there are some for each.
        given: where it lies, if the caller says so.
        used: the parts of the program that use it.
    """

    dtype: torch.dtype
    size: int
    by_token: bool
    given: str = ""
    used: set[int] = field(default_factory=set)

    @property
    def kind(self) -> str:
        """The type of its numbers."""
        return TYPES[self.dtype]

    @property
    def is_local(self) -> bool:
        """Whether one loop over tokens alone uses it."""
        small = self.size <= MAX_LOCAL
        return self.by_token and not self.given and small and len(self.used) == 1


def combined(code: Callable[..., str], operands: Sequence[Value | float], **options: Any) -> Value:
    """An expression in float32 of values and numbers."""
    values = [operand for operand in operands if isinstance(operand, Value)]
    shape = torch.broadcast_shapes(*(value.shape for value in values))
    codes = [one.code if isinstance(one, Value) else constant(one) for one in operands]
    leaves = tuple(leaf.expand(shape) for value in values for leaf in value.leaves)
    return Value(code(*codes, **options), leaves, shape, torch.float32)


def token_axis(shape: torch.Size) -> int | None:
    """Which axis counts tokens."""
    return shape.index(TOKENS) if TOKENS in shape else None


def inner_axes(shape: torch.Size) -> list[int]:
    """The axes of what one token has."""
    return [axis for axis, size in enumerate(shape) if size != TOKENS]


def loops(shape: torch.Size, axes: Sequence[int], clause: str | None = None) -> list[str]:
    """Loops over axes; the innermost is one of vectors if there is a clause, which may be empty."""
    axes = [axis for axis in axes if shape[axis] > 1]
    lines = [f"for (int64_t i{axis} = 0; i{axis} < {shape[axis]}; ++i{axis})" for axis in axes]
    if lines and clause is not None:
        lines.insert(-1, f"#pragma omp simd {clause}")
    return lines


def times(code: str, factor: float) -> str:
    """A product with a number."""
    return code if factor == 1 else f"({code} * {constant(factor)})"


def constant(number: float) -> str:
    """A number as C++ has it."""
    if not math.isfinite(number):
        raise SourceError(f"there is no C++ for {number}")
    return f"{float(number)!r}f" if number >= 0 else f"({float(number)!r}f)"
