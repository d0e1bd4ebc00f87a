"""Linear layers of few rows on a CPU, with packed weights.

A decoding step multiplies 1 to 64 rows by every weight of the model, where `F.linear` is slow. With
weights that were packed once (see `packed_gemm`) the GEMM takes a half to a third of the time:

    form                       rows       memory
    packed weight              any        a second copy of the weights
    packed weight in bfloat16  any        half of that; for drafts only
    packed weight, padded      1 to 3     as packed; where four rows are faster than one
    (weight @ x.T).T           4 to 48    none; float32 only
    F.linear                   others     none
    4-bit layer in place       any        none (see `four_bit`)
    8-bit layer in place       1 to 64    none (see `eight_bit`)
    output head, best only     few        a copy in 8 bits (see `screened_weight`)

The forms add in different order, except the last with AVX512-BF16. Unchanged are other quantized
layers, dtypes other than float32 and bfloat16, modules with an overridden forward (accelerate),
autograd and autocast, and everything that runs outside of `use_packed_linears`, also in other
threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from hf_spec_kernels import huge_pages
from hf_spec_kernels.eight_bit_linear import EightBitWeight
from hf_spec_kernels.four_bit_linear import FourBitWeight
from hf_spec_kernels.packed_linear import PackedWeight
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.backend.cpu.eight_bit import (
    eight_bit_forward,
    eight_bit_storage,
    eight_bit_weight,
    is_dynamic,
    is_eight_bit,
)
from hf_spec.backend.cpu.four_bit import (
    four_bit_forward,
    four_bit_storage,
    four_bit_weight,
    is_four_bit,
)
from hf_spec.backend.cpu.packed_gemm import (
    SAME_BITS,
    Packed,
    gemm,
    padded_gemm,
    rounded_rows,
)
from hf_spec.backend.cpu.packed_weights import (
    PackedForms,
    pack_weights,
    packed_weights_of,
    screened_weight_of,
    version_of,
)
from hf_spec.engine.fast.greedy_head import GreedyHead
from hf_spec.engine.forward.forward_overrides import ForwardOverrides

# Smaller weights are faster unpacked (break-even at 256 x 256). In dtypes of `SAME_BITS` they are
# packed all the same.
MIN_WEIGHT_ELEMENTS = 1 << 16
# Numbers of rows for which (weight @ x.T).T is not slower than F.linear.
TRANSPOSED_ROWS = range(4, 49)
# Marks a weight that can no longer be packed: every call uses the forward of the class.
NOT_PACKED = PackedForms(())


class ThreadMode(threading.local):
    """Settings of the forward pass that this thread runs."""

    # True inside `use_packed_linears`.
    fast: bool = False
    # True if weights may be rounded to bfloat16, for drafts.
    rounded: bool = False
    # True for the first tokens of a row.
    prompt: bool = False
    # The head of which the best outputs alone are read, if any.
    greedy_head: GreedyHead | None = None


mode = ThreadMode()
# Modules inside an `install_packed_linears` block.
_forwards = ForwardOverrides()
# Quantized module -> the address of its codes when they were moved to huge pages.
_moved: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class _Checks(threading.local):
    """Weights that this thread has compared with their packed forms.

    They are compared again after code ran that may have changed them, such as a nested call by a
    logits processor that merges an adapter.
    """

    def __init__(self) -> None:
        # Number of times that all comparisons became outdated.
        self.epoch = 0
        self.open_sessions = 0
        # True if a forward pass ran in this epoch.
        self.ran = False
        # (id of the weight, rounded) of weights that were compared in this epoch.
        self.done: set[tuple[int, bool]] = set()

    def renew(self) -> None:
        self.epoch += 1
        self.ran = False
        self.done.clear()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        # Code that ran before or inside a session may have changed weights.
        if self.ran or not self.open_sessions:
            self.renew()
        self.open_sessions += 1
        try:
            yield
        finally:
            self.open_sessions -= 1
            if self.ran:
                self.renew()


_checks = _Checks()


class PackedLinears:
    """Linear layers of a model whose weights can be packed, during one generation."""

    def __init__(self, modules: Sequence[nn.Module], rounded: bool):
        self._linears = [
            m for m in modules if type(m) is nn.Linear and (has_fast_forward(m) or _is_suitable(m))
        ]
        self._rounded = rounded
        self._compare()

    def refresh(self) -> None:
        """Pack changed weights again; call before every forward pass of the model.

        A change through `.data` is detected if this thread made another speculative call since.
        """
        weights = [linear.weight for linear in self._linears]
        if not all(map(is_, weights, self._weights)) or _versions(weights) != self._seen:
            _checks.renew()
        if self._epoch != _checks.epoch:
            self._compare()
        _checks.ran = True

    def _compare(self) -> None:
        self._epoch = _checks.epoch
        self._weights = [linear.weight for linear in self._linears]
        self._seen = _versions(self._weights)
        fresh = [w for w in self._weights if (id(w), self._rounded) not in _checks.done]
        pack_weights([w for w in fresh if _is_packable(w)], self._rounded)
        _checks.done.update((id(weight), self._rounded) for weight in fresh)
        for linear in self._linears:
            if isinstance(forward := vars(linear).get("forward"), _PackedForward):
                forward.bind(_packed_forms_for(linear))


@contextlib.contextmanager
def install_packed_linears(model: nn.Module, rounded: bool = False) -> Iterator[PackedLinears]:
    """Install forwards with packed weights, which take effect inside `use_packed_linears`.

    They are removed when the last block that uses a module ends; packed weights stay cached.
    Entering reads every weight once to detect changes, which takes less than a decoding step.

    Args:
        model: any module; parts on other devices are unchanged.
        rounded: True for a draft model: its weights may be rounded to bfloat16. Other users of the
            same modules are not affected.
    """
    modules = [] if torch.is_autocast_enabled("cpu") else list(model.modules())
    with _checks.session():
        linears = PackedLinears(modules, rounded)
        with _forwards.install(modules, _fast_forwards):
            yield linears


def packed_changes() -> int:
    """Return a counter of changes of the packed weights that linear layers use."""
    return _PackedForward.changes


@contextlib.contextmanager
def use_packed_linears(
    rounded: bool = False, prompt: bool = False, greedy_head: GreedyHead | None = None
) -> Iterator[None]:
    """Run the installed forwards of this thread with packed weights inside the block.

    With `greedy_head`, outputs of that layer other than the best of each row may be -inf.
    """
    before = mode.fast, mode.rounded, mode.prompt, mode.greedy_head
    mode.fast, mode.rounded, mode.prompt, mode.greedy_head = True, rounded, prompt, greedy_head
    try:
        yield
    finally:
        mode.fast, mode.rounded, mode.prompt, mode.greedy_head = before


def has_fast_forward(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if the forward of a module is the one that `install_packed_linears` installed."""
    return _forwards.has(module)


def _fast_forwards(modules: list[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    codes: dict[nn.Module, Tensor | None] = {}
    for linear in modules:
        if "forward" not in vars(linear) and is_four_bit(linear):
            forwards[linear] = _in_place_forward(linear, four_bit_forward)
            codes[linear] = four_bit_storage(linear)
        elif "forward" not in vars(linear) and is_eight_bit(linear):
            forwards[linear] = _in_place_forward(linear, _eight_bit_forward)
            codes[linear] = eight_bit_storage(linear)
        if not _is_suitable(linear):
            continue
        if (forms := _packed_forms_for(linear)) is not None:
            forwards[linear] = _PackedForward(linear, forms)
        elif linear.weight.dtype == torch.float32:
            forwards[linear] = _transposed_forward(linear)
    _move_codes(codes)
    return forwards


def _move_codes(codes: Mapping[nn.Module, Tensor | None]) -> None:
    """Move the codes of quantized modules, which are read in place, to huge pages, once each."""
    fresh = []
    for module, found in codes.items():
        if found is not None and _moved.get(module) != found.data_ptr():
            _moved[module] = found.data_ptr()
            fresh.append(found)
    huge_pages.move(fresh)


def _is_suitable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return _has_packable_weight(module)


def _packed_forms_for(module: nn.Linear) -> PackedForms | None:
    return packed_weights_of(module.weight) if _has_packable_weight(module) else None


def _has_packable_weight(module: nn.Linear) -> bool:
    weight, bias = module._parameters.get("weight"), module.bias
    return _is_packable(weight) and (
        bias is None or (type(bias) is nn.Parameter and bias.dtype == module.weight.dtype)
    )


def _is_packable(weight: Tensor | None) -> bool:
    # With pruning the weight is recomputed and not a parameter; torchao uses a subclass.
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_contiguous()
        and (weight.dtype in SAME_BITS or weight.numel() >= MIN_WEIGHT_ELEMENTS)
    )


def _versions(weights: Sequence[Tensor]) -> list[int]:
    """Return the counters of in-place changes."""
    return [version_of(weight) for weight in weights]


def is_quantized(module: nn.Module) -> bool:
    """Return True for a layer of bitsandbytes whose weight compiled layers may read."""
    return is_four_bit(module) or (is_dynamic(module) and is_eight_bit(module))


def kernel_weight(
    linear: nn.Module | Tensor, rows: int, dtype: torch.dtype
) -> PackedWeight | FourBitWeight | EightBitWeight | Tensor | None:
    """Return the weight that our kernel reads for `rows` rows of a linear layer, or of a weight.

    Small weights are read unpacked. The result is None if another form is faster for many rows, or
    the weight is not packed for our kernel. For few rows our kernel is used even where a single
    GEMM is faster otherwise, since a compiled layer saves more. `dtype` is that of the rows.
    """
    if isinstance(linear, nn.Module) and is_four_bit(linear):
        return four_bit_weight(linear, dtype, rows) if has_fast_forward(linear) else None
    if isinstance(linear, nn.Module) and is_dynamic(linear):
        fast = has_fast_forward(linear)
        return eight_bit_weight(linear, dtype, rows, mode.prompt) if fast else None
    if isinstance(linear, nn.Linear) and has_fast_forward(linear):
        forward = linear.__dict__["forward"]
        packed = forward.packed(rows, least=1) if isinstance(forward, _PackedForward) else None
        return packed if isinstance(packed, PackedWeight) else None
    weight: Any = linear if isinstance(linear, Tensor) else linear.weight
    return weight if weight.numel() < MIN_WEIGHT_ELEMENTS and weight.is_contiguous() else None


class _PackedForward:
    """Forward of a linear layer with packed weights; falls back to `F.linear`."""

    # Number of `bind` calls of all modules that changed the packed weights.
    changes = 0

    def __init__(self, module: nn.Linear, forms: PackedForms):
        self._module = module
        self._forms = NOT_PACKED
        self.bind(forms)

    def bind(self, forms: PackedForms | None) -> None:
        """Take the module's current bias and dtype, and the packed forms of its weight if any."""
        module = self._module
        self._forms, before = forms or NOT_PACKED, self._forms
        self._bias = module.bias
        self._dtype, self._width = module.weight.dtype, module.in_features
        if self._forms is not before:
            _PackedForward.changes += 1

    def _plain(self, states: Tensor) -> Tensor:
        return F.linear(states, self._module.weight, self._module.bias)

    def packed(self, rows: int, least: int | None = None) -> Packed | None:
        """Return the packed weight to use for `rows` rows, from `least` on; None for `F.linear`."""
        forms = self._forms
        exact, rounded = forms.exact, forms.rounded if mode.rounded else None
        if rounded is not None and (exact is None or rows <= rounded_rows()):
            return rounded
        if least is None:
            least = max(forms.rows.least, forms.rows.padded)
        return exact if least <= rows <= forms.rows.most else None

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear has
        """Compute the linear layer."""
        width = self._width
        other = input.dtype != self._dtype or input.shape[-1] != width
        if other or not mode.fast or _is_left_alone():
            return self._plain(input)
        rows = input.numel() // width
        if (packed := self.packed(rows)) is not None:
            if (head := mode.greedy_head) is None:
                return gemm(input, packed, self._bias)
            if (best := self._best(head, input)) is not None:
                return best
            output = gemm(input, packed, self._bias)
            head.record(self._module, output)
            return output
        exact, padded = self._forms.exact, self._forms.rows.padded
        if exact is None or not self._forms.rows.least <= rows < padded:
            return self._plain(input)
        # Steps have a single axis of rows; a view takes as long as any small operation.
        lines = input if input.shape[-2:-1] == (rows,) else input.reshape(rows, width)
        output = padded_gemm(lines, exact, self._bias, padded)
        return output if lines is input else output.view(*input.shape[:-1], -1)

    def _best(self, head: GreedyHead, states: Tensor) -> Tensor | None:
        """Compute the best outputs of a head, others are -inf; None to compute all of them."""
        if self._bias is not None or not head.may_screen(self._module):
            return None
        lines = states.reshape(-1, self._width)
        screened = screened_weight_of(self._module.weight, lines)
        best = None if screened is None else screened.best(lines)
        return None if best is None else best.view(*states.shape[:-1], -1)


def _transposed_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    width = module.in_features

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear has
        weight, bias = module.weight, module.bias
        rows = input.numel() // width
        if (
            not mode.fast
            or rows not in TRANSPOSED_ROWS
            or not input.dtype == weight.dtype == torch.float32
            or input.shape[-1] != width
            or _is_left_alone()
        ):
            return F.linear(input, weight, bias)
        # Contiguous, since models call `view` on the result.
        output = (weight @ input.reshape(rows, width).T).T.contiguous()
        if bias is not None:
            output += bias
        return output.view(*input.shape[:-1], -1)

    return forward


def _in_place_forward(
    module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor | None]
) -> Callable[..., Any]:
    """Return a forward by a kernel that reads the storage of the module's library."""
    plain = type(module).forward

    # Classes call the input by different names.
    def forward(*given: Tensor, **named: Tensor) -> Any:
        (states,) = (*given, *named.values())
        fast = mode.fast and not _is_left_alone()
        results = run(module, states) if fast else None
        return plain(module, states) if results is None else results

    return forward


def _eight_bit_forward(module: nn.Module, states: Tensor) -> Tensor | None:
    return eight_bit_forward(module, states, mode.prompt)


def _is_left_alone() -> bool:
    """Return True under autograd or autocast, which may begin inside a forward pass."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
