"""C++ text of a compiled layer: its memory, and its loops over tokens in the order of writing.

Statements on one token go into the newest loop over tokens. Statements on all tokens end that loop,
and values that do not depend on tokens are computed before all loops. Memory that only one loop
uses is local to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_spec.backend.cpu.layer_values import (
    TOKENS,
    Array,
    Leaf,
    Value,
    inner_axes,
    loops,
    token_axis,
)

# Fewer tokens run on one thread.
MIN_TOKENS = 8
HEAD = """#include "layer.h"

extern "C" void run(const void* const* constants, const Weight* weights,
                    const Attention* attention, const Call* call) {
const void* const* const inputs = call->inputs;
void* const* const outputs = call->outputs;
const int64_t tokens = call->tokens;
const int threads = call->threads;"""


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
        others = [size for place, size in enumerate(shape) if place != axis]
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
