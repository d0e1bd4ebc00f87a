"""A low-rank change of a linear layer that applies to some tokens of a forward pass.

A forward hook adds x A^T B^T to the chosen tokens (Hu et al. 2022, arXiv 2106.09685, with its
scaling factor inside B). All other tokens stay bit-identical: nothing is added to them, not even
zero. The hook works on layers of any class that maps tokens independently. Compiled layers know
hooks of this class: they contain the change and do not call the hook.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_spec.common.errors import UnsupportedError


class ChosenTokens(threading.local):
    """Tokens to which changes apply; per thread, since several generations may run in parallel.

    Attributes:
        gate: (T,) bool on the host, True for the chosen tokens, with batch and sequence flattened;
            None outside of `chosen`.
    """

    gate: Tensor | None = None
    # Rows of the chosen tokens: a slice of consecutive rows saves a gather in every layer.
    rows: slice | Tensor = slice(0, 0)

    @contextmanager
    def chosen(self, gate: Tensor) -> Iterator[None]:
        """Let this thread's changes apply to the tokens of a forward pass that `gate` chooses."""
        indices = gate.nonzero()[:, 0]
        first, end = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)
        self.rows = slice(first, end) if end - first == len(indices) else indices
        self.gate = gate
        try:
            yield
        finally:
            self.gate = None


class LowRankChange:
    """Forward hook of one linear layer.

    Attributes:
        down, up: A (rank, inputs) and B (outputs, rank). Compiled C++ needs contiguous A and B^T.
        tokens: tokens to which it applies.
    """

    def __init__(self, down: Tensor, up: Tensor, tokens: ChosenTokens):
        self.down = down
        self.up = up
        self.tokens = tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> LowRankChange:
        """Return itself: a copy of a model shares the hooks of a running generation."""
        return self

    @property
    def acts(self) -> bool:
        """True if it applies to the forward pass that this thread runs."""
        return self.tokens.gate is not None

    def __call__(
        self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        """Change the output of the layer; return None if it was changed in place, or not at all."""
        gate, rows = self.tokens.gate, self.tokens.rows
        if gate is None:
            return None
        num_tokens = len(gate)
        flat = output.reshape(-1, output.shape[-1])
        if flat.shape[0] != num_tokens:
            raise UnsupportedError(
                f"a layer of class {type(module).__name__} saw {flat.shape[0]} of {num_tokens} "
                "tokens, so a gated LoRA cannot find the chosen ones; leave out the layer"
            )
        if isinstance(rows, Tensor):
            rows = rows.to(flat.device)
        source = inputs[0].reshape(num_tokens, -1)[rows].to(self.down.dtype)
        narrow = nn.functional.linear(source, self.down)
        if not torch.is_grad_enabled() and output.is_contiguous():
            # In place: no other module has read the output yet.
            if isinstance(rows, slice) and output.dtype == self.up.dtype:
                flat[rows].addmm_(narrow, self.up.T)
            else:
                flat[rows] += nn.functional.linear(narrow, self.up).to(output.dtype)
            return None
        change = nn.functional.linear(narrow, self.up).to(output.dtype)
        if isinstance(rows, slice):
            rows = torch.arange(num_tokens, device=flat.device)[rows]
        return flat.index_add(0, rows, change).view_as(output)


def changes_in(module: nn.Module) -> list[LowRankChange]:
    """Return the low-rank changes among the forward hooks of a module."""
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, LowRankChange)]
