"""Products of few rows on a CPU, computed with weights packed for it.

A decoding step multiplies 1 to 64 rows by every weight of the model, where `F.linear` is slow.
With weights that were packed once (see `packed_products`) the same product takes a half to a third
of the time:

    form                 products of         takes
    packed weight        any rows            a second copy of the weights in memory
    the same, bfloat16   any rows            half of that; for drafts alone
    the same, padded     1 to 3 rows         where four rows take less time than one
    (weight @ x.T).T     4 to 48 rows        nothing; float32 only
    F.linear             the rest            nothing

All add up the same products, in different order. Left alone: classes other than `nn.Linear`
(quantised layers), dtypes other than float32 and bfloat16, modules with a forward of their own
(accelerate), autograd, autocast; and whatever runs outside of `fast_products`, in other threads or
in between, to the last bit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from hf_spec_kernels.packed_linear import PackedWeight
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.cpu.packed_copies import Copies, copies_of, make_copies
from hf_spec.cpu.packed_products import (
    Packed,
    packed_product,
    padded_product,
    rounded_rows,
    rounding_pays,
)
from hf_spec.execution.own_forwards import OwnForwards

# With fewer elements the packed call costs more than it saves (measured, break-even at 256 x 256).
MIN_WEIGHT_ELEMENTS = 1 << 16
# Rows for which (weight @ x.T).T was no slower than F.linear on either of two machines measured.
TRANSPOSED_ROWS = range(4, 49)


class _Chosen(threading.local):
    """Whether this thread runs a forward that wants its products fast, and need not be exact."""

    fast: bool = False
    rounded: bool = False


_chosen = _Chosen()
# Of modules inside a `fast_cpu_linears` block.
_forwards = OwnForwards()


@contextlib.contextmanager
def fast_cpu_linears(model: nn.Module, rounded: bool = False) -> Iterator[None]:
    """Make `model` ready for products on the CPU in their fastest form, inside `fast_products`.

    Suitable modules get a `forward` of their own, which goes when the last block that uses the
    module ends. Packed weights stay for the next call. Entry reads every weight once, to pack those
    again that changed in between by whatever way; this takes less than one decoding step. Weights
    must not change inside the block.

    Args:
        model: any module; parts on other devices are left alone.
        rounded: whether it drafts, with weights that may be rounded to bfloat16. What somebody else
            computes with the same modules stays exact.
    """
    modules = [] if torch.is_autocast_enabled("cpu") else list(model.modules())
    linears = [one for one in modules if type(one) is nn.Linear]
    make_copies([one.weight for one in linears if _lacks_copies(one, rounded)], rounded)
    with _forwards.lent(modules, _fast_forwards):
        yield


@contextlib.contextmanager
def fast_products(rounded: bool = False) -> Iterator[None]:
    """What this thread runs of models made ready computes its products in their fastest form.

    With `rounded`, of weights that were rounded for it.
    """
    before, _chosen.fast, _chosen.rounded = (_chosen.fast, _chosen.rounded), True, rounded
    try:
        yield
    finally:
        _chosen.fast, _chosen.rounded = before


def has_fast_forward(module: nn.Module) -> bool:
    """Whether a module has a forward from here, and none of its own or of somebody else."""
    return _forwards.has(module)


def _lacks_copies(linear: nn.Linear, rounded: bool) -> bool:
    """Whether the weight has to be looked at: those of modules in use are as they were."""
    if not has_fast_forward(linear):
        return _is_suitable(linear)
    if (copies := copies_of(linear.weight)) is None:
        return False
    if rounded and rounding_pays(linear.weight):
        return copies.rounded is None
    return copies.exact is None


def _fast_forwards(modules: list[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """The forwards of those modules that have a faster one."""
    linears = [one for one in modules if type(one) is nn.Linear and _is_suitable(one)]
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for linear in linears:
        if (copies := copies_of(linear.weight)) is not None:
            plain = partial(F.linear, weight=linear.weight, bias=linear.bias)
            forwards[linear] = _PackedForward(linear, copies, linear.bias, plain)
        elif linear.weight.dtype == torch.float32:
            forwards[linear] = _transposed_forward(linear)
    return forwards


def _is_suitable(module: nn.Linear) -> bool:
    if "forward" in module.__dict__:
        return False
    # Pruning and the like recompute the weight, which is then no parameter; torchao subclasses it.
    weight, bias = module._parameters.get("weight"), module.bias
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_contiguous()
        and weight.numel() >= MIN_WEIGHT_ELEMENTS
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype == weight.dtype))
    )


def drafts_rounded() -> bool:
    """Whether what this thread runs may read weights that were rounded for drafts."""
    return _chosen.rounded


def served_weight(product: nn.Linear | Tensor, rows: int) -> PackedWeight | Tensor | None:
    """What our kernel reads for this thread's product of so many rows with a layer, or a weight.

    Small weights are as they are; None where the kernel has nothing to read, or many rows are
    faster otherwise. A single product of one row may be, too; several with what lies in between are
    not.
    """
    if isinstance(product, nn.Linear) and has_fast_forward(product):
        forward = product.__dict__["forward"]
        packed = forward.packed(rows, least=1) if isinstance(forward, _PackedForward) else None
        return packed if isinstance(packed, PackedWeight) else None
    weight = product if isinstance(product, Tensor) else product.weight
    return weight if weight.numel() < MIN_WEIGHT_ELEMENTS and weight.is_contiguous() else None


class _PackedForward:
    """The forward of a linear layer with packed copies; the plain one for other input."""

    def __init__(
        self,
        module: nn.Linear,
        copies: Copies,
        bias: Tensor | None,
        plain: Callable[[Tensor], Tensor],
    ):
        self._copies = copies
        self._bias = bias
        self._plain = plain
        self._dtype, self._width = module.weight.dtype, module.in_features

    def packed(self, rows: int, least: int | None = None) -> Packed | None:
        """The copy that serves this thread's products of so many rows; None if none does.

        `least` rows are given where fewer than those measured are served, too.
        """
        copies = self._copies
        exact, rounded = copies.exact, copies.rounded if _chosen.rounded else None
        if rounded is not None and (exact is None or rows <= rounded_rows()):
            return rounded
        if least is None:
            least = max(copies.rows.least, copies.rows.padded)
        return exact if least <= rows <= copies.rows.most else None

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear has
        """The product."""
        width = self._width
        other = input.dtype != self._dtype or input.shape[-1] != width
        if other or not _chosen.fast or _is_left_alone():
            return self._plain(input)
        rows = input.numel() // width
        if (packed := self.packed(rows)) is not None:
            return packed_product(input, packed, self._bias)
        exact, padded = self._copies.exact, self._copies.rows.padded
        if exact is None or not self._copies.rows.least <= rows < padded:
            return self._plain(input)
        # In a step the rows are one axis: views take as long as other small operations.
        lines = input if input.shape[-2:-1] == (rows,) else input.reshape(rows, width)
        output = padded_product(lines, exact, self._bias, padded)
        return output if lines is input else output.view(*input.shape[:-1], -1)


def _transposed_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias, width = module.weight, module.bias, module.in_features

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear has
        rows = input.numel() // width
        if (
            not _chosen.fast
            or rows not in TRANSPOSED_ROWS
            or input.dtype != torch.float32
            or input.shape[-1] != width
            or _is_left_alone()
        ):
            return F.linear(input, weight, bias)
        # Contiguous, since models call `view` on what a linear layer returns.
        output = (weight @ input.reshape(rows, width).T).T.contiguous()
        if bias is not None:
            output += bias
        return output.view(*input.shape[:-1], -1)

    return forward


def _is_left_alone() -> bool:
    """Whether a product is one of autograd, or of autocast, which may begin inside a forward."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
