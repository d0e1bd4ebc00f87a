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
(accelerate), autograd, autocast; and whatever runs outside of `use_packed_linears`, in other
threads or in between, to the last bit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from hf_spec_kernels.packed_linear import PackedWeight
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.backend.cpu.packed_copies import Copies, copies_of, make_copies
from hf_spec.backend.cpu.packed_products import (
    SAME_BITS,
    Packed,
    packed_product,
    padded_product,
    rounded_rows,
)
from hf_spec.engine.forward.forward_overrides import ForwardOverrides

# With fewer elements the packed call costs more than it saves (measured, break-even at 256 x 256).
# It is made anyway in dtypes of `SAME_BITS`.
MIN_WEIGHT_ELEMENTS = 1 << 16
# Rows for which (weight @ x.T).T was no slower than F.linear on either of two machines measured.
TRANSPOSED_ROWS = range(4, 49)
# For a weight that cannot be packed any more: every call uses the forward of the class.
NO_COPIES = Copies(())


class _Chosen(threading.local):
    """Whether this thread runs a forward that wants its products fast, and need not be exact."""

    fast: bool = False
    rounded: bool = False


_chosen = _Chosen()
# Modules inside an `install_packed_linears` block.
_forwards = ForwardOverrides()


class _Checks(threading.local):
    """Weights that this thread has compared with their packed copies.

    They are compared again after something ran that may have changed them: another call of the
    thread, made by a logits processor for instance, with an adapter merged for it.

    Attributes:
        epoch: counts the occasions for comparing all weights again.
        sessions: how many sessions of this thread are open.
        ran: whether a forward pass ran in this epoch.
        done: (id of the weight, rounded) of the weights that were compared in this epoch.
    """

    epoch: int = 0
    sessions: int = 0
    ran: bool = False

    def __init__(self) -> None:
        self.done: set[tuple[int, bool]] = set()

    def renew(self) -> None:
        """Begin an epoch."""
        self.epoch += 1
        self.ran = False
        self.done.clear()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Count a session. What ran before it, and inside it, may have changed weights."""
        if self.ran or not self.sessions:
            self.renew()
        self.sessions += 1
        try:
            yield
        finally:
            self.sessions -= 1
            if self.ran:
                self.renew()


_checks = _Checks()


class PackedLinears:
    """The linear layers of a model that can have packed weights, during one generation."""

    def __init__(self, modules: Sequence[nn.Module], rounded: bool):
        suitable = (module for module in modules if type(module) is nn.Linear)
        self._linears = [one for one in suitable if has_fast_forward(one) or _is_suitable(one)]
        self._rounded = rounded
        self._compare()

    def refresh(self) -> None:
        """Pack weights again that have changed; call before every forward pass of the model.

        A change through `.data` is seen if this thread has made another speculative call since.
        """
        weights = [one.weight for one in self._linears]
        if not all(map(is_, weights, self._weights)) or _versions(weights) != self._seen:
            _checks.renew()
        if self._epoch != _checks.epoch:
            self._compare()
        _checks.ran = True

    def _compare(self) -> None:
        """Compare weights with their packed copies, which reads every weight once."""
        self._epoch = _checks.epoch
        self._weights = [one.weight for one in self._linears]
        self._seen = _versions(self._weights)
        fresh = [w for w in self._weights if (id(w), self._rounded) not in _checks.done]
        make_copies([w for w in fresh if _is_packable(w)], self._rounded)
        _checks.done.update((id(weight), self._rounded) for weight in fresh)
        for linear in self._linears:
            if isinstance(forward := vars(linear).get("forward"), _PackedForward):
                forward.bind(_copies_for(linear))


@contextlib.contextmanager
def install_packed_linears(model: nn.Module, rounded: bool = False) -> Iterator[PackedLinears]:
    """Install forwards with packed weights, which compute inside `use_packed_linears`.

    They are removed when the last block that uses a module ends; packed weights are cached. Entry
    reads every weight once, to pack those again that have changed in whatever way; this takes less
    than one decoding step.

    Args:
        model: any module; parts on other devices are left alone.
        rounded: True for a model that drafts: its weights may be rounded to bfloat16. Others that
            compute with the same modules are not affected.
    """
    modules = [] if torch.is_autocast_enabled("cpu") else list(model.modules())
    with _checks.session():
        linears = PackedLinears(modules, rounded)
        with _forwards.install(modules, _fast_forwards):
            yield linears


def packed_changes() -> int:
    """Return a number that changes when a linear layer in use gets other packed weights."""
    return _PackedForward.changes


@contextlib.contextmanager
def use_packed_linears(rounded: bool = False) -> Iterator[None]:
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


def _fast_forwards(modules: list[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """The forwards of those modules that have a faster one."""
    linears = [one for one in modules if type(one) is nn.Linear and _is_suitable(one)]
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for linear in linears:
        if (copies := _copies_for(linear)) is not None:
            forwards[linear] = _PackedForward(linear, copies)
        elif linear.weight.dtype == torch.float32:
            forwards[linear] = _transposed_forward(linear)
    return forwards


def _is_suitable(module: nn.Linear) -> bool:
    return "forward" not in module.__dict__ and _has_packable_weight(module)


def _copies_for(module: nn.Linear) -> Copies | None:
    """Return the packed copies of the weight that a layer has now."""
    return copies_of(module.weight) if _has_packable_weight(module) else None


def _has_packable_weight(module: nn.Linear) -> bool:
    weight, bias = module._parameters.get("weight"), module.bias
    return _is_packable(weight) and (
        bias is None or (type(bias) is nn.Parameter and bias.dtype == module.weight.dtype)
    )


def _is_packable(weight: Tensor | None) -> bool:
    # Pruning and the like recompute the weight, which is then no parameter; torchao subclasses it.
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_contiguous()
        and (weight.dtype in SAME_BITS or weight.numel() >= MIN_WEIGHT_ELEMENTS)
    )


def _versions(weights: Sequence[Tensor]) -> list[int]:
    """Return the counters of changes in place; tensors of inference mode have none."""
    return [-1 if weight.is_inference() else weight._version for weight in weights]


def reads_rounded_weights() -> bool:
    """Whether what this thread runs may read weights that were rounded for drafts."""
    return _chosen.rounded


def kernel_weight(product: nn.Linear | Tensor, rows: int) -> PackedWeight | Tensor | None:
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
    """The forward of a linear layer with packed copies; that of its class for other input.

    Attributes:
        changes: how often any of these was bound to other packed copies.
    """

    changes = 0

    def __init__(self, module: nn.Linear, copies: Copies):
        self._module = module
        self._copies = NO_COPIES
        self.bind(copies)

    def bind(self, copies: Copies | None) -> None:
        """Take the module as it is now, with packed copies of its weight if there are any."""
        module = self._module
        self._copies, before = copies or NO_COPIES, self._copies
        self._bias = module.bias
        self._dtype, self._width = module.weight.dtype, module.in_features
        if self._copies is not before:
            _PackedForward.changes += 1

    def _plain(self, states: Tensor) -> Tensor:
        return F.linear(states, self._module.weight, self._module.bias)

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
    width = module.in_features

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear has
        weight, bias = module.weight, module.bias
        rows = input.numel() // width
        if (
            not _chosen.fast
            or rows not in TRANSPOSED_ROWS
            or not input.dtype == weight.dtype == torch.float32
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
