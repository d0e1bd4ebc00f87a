"""The text of a program over tokens: its memory, and its loops in the order they were written.

Statements on one token go into the newest loop over tokens, those on all of them end it, and what
no token changes is computed before. Memory that one loop alone uses is the loop's own.
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

# Fewer tokens are not divided among threads.
MIN_TOKENS = 8
HEAD = """#include "decoder_layer/layer.h"

extern "C" void run(const void* const* constants, const Weight* weights,
                    const Attention* attention, const Call* call) {
const void* const* const inputs = call->inputs;
void* const* const outputs = call->outputs;
const int64_t tokens = call->tokens;
const int threads = call->threads;"""


class LayerText:
    """A program that is being written."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        # Statements on what no token changes; then loops over tokens, each a list of statements,
        # and statements between them.
        self._before: list[str] = []
        self._parts: list[list[str] | str] = []

    def stored(self, value: Value) -> Value:
        """The same numbers in memory of their own."""
        to = self.memory(value.shape, value.dtype)
        self.assign(to, value)
        return Value.of(to, value.dtype)

    def in_memory(self, value: Value, fits: Callable[[Tensor], bool]) -> Leaf:
        """Where a kernel can read a value."""
        leaf = value.leaf
        if leaf is None or self._arrays[leaf.array].dtype != value.dtype or not fits(leaf.form):
            return self.stored(value).leaves[0]
        return leaf

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Leaf:
        """New memory, in which the numbers of each token lie together."""
        axis = token_axis(shape)
        others = [size for place, size in enumerate(shape) if place != axis]
        form = torch.empty(others if axis is None else [TOKENS, *others], device="meta")
        return self.array(form if axis is None else form.movedim(0, axis), dtype)

    def array(self, form: Tensor, dtype: torch.dtype, name: str = "", given: str = "") -> Leaf:
        """Numbers of a form, in memory that the caller has `given` or else in some of its own."""
        name = name or f"b{len(self._arrays)}"
        by_token = TOKENS in form.shape
        size = form.numel() // (TOKENS if by_token else 1)
        self._arrays[name] = Array(dtype, size, by_token, given)
        return Leaf(name, form)

    def assign(self, to: Leaf, value: Value) -> None:
        """Write a value to where it is to be."""
        shape = to.form.shape
        if shape.numel():
            wide = value.expand(shape)
            lines = loops(shape, inner_axes(shape), "")
            self.for_each(
                "\n".join([*lines, f"narrow({wide.expression}, {to.at});"]), [to, *wide.leaves]
            )

    def for_each(self, line: str, used: Sequence[Leaf]) -> None:
        """Put a statement into the newest loop over tokens, before all where no token matters."""
        if not any(self._arrays[leaf.array].by_token for leaf in used):
            self._before.append(line)
            return
        if not self._parts or isinstance(self._parts[-1], str):
            self._parts.append([])
        self._parts[-1].append(line)  # type: ignore[union-attr]
        self._use(used)

    def for_all(self, line: str, used: Sequence[Leaf]) -> None:
        """Put a statement on all tokens together after the newest loop."""
        self._parts.append(line)
        self._use(used)

    def _use(self, used: Sequence[Leaf]) -> None:
        for leaf in used:
            self._arrays[leaf.array].used.add(len(self._parts) - 1)

    def whole(self) -> str:
        """The whole program."""
        lines = [HEAD, *self._given(), *self._scratch()]
        lines += [f"auto* const {n} = all_{n};" for n, a in self._arrays.items() if not a.by_token]
        lines += self._before
        for index, part in enumerate(self._parts):
            lines += [part] if isinstance(part, str) else self._loop(index, part)
        return "\n".join([*lines, "}", ""])

    def _given(self) -> list[str]:
        """Memory of the caller's."""
        lines = []
        for name, array in self._arrays.items():
            if array.given:
                kept = "" if array.given.startswith("outputs") else "const "
                kind = f"{kept}{array.kind}*"
                lines.append(f"{kind} const all_{name} = static_cast<{kind}>({array.given});")
        return lines

    def _scratch(self) -> list[str]:
        """Memory of the program's own, in one piece."""
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
        """A loop over tokens."""
        lines = [
            "#pragma omp parallel for num_threads(threads) schedule(static) "
            f"if (threads > 1 && tokens >= {MIN_TOKENS})",
            "for (int64_t token = 0; token < tokens; ++token) {",
        ]
        for name, array in self._arrays.items():
            if array.by_token and index in array.used:
                own = f"alignas(64) {array.kind} {name}[{array.size}];"
                shared = f"auto* const {name} = all_{name} + token * {array.size};"
                lines.append(own if array.is_local else shared)
        return [*lines, *statements, "}"]
