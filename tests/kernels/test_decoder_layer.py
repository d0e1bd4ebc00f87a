"""Building blocks of compiled layers: numbers, and matmuls with small and packed weights."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hf_spec_kernels.build import BuildError
from hf_spec_kernels.decoder_layer import Attention, Call, Storage, Weight, build_layer, weight_of
from hf_spec_kernels.packed_linear import pack_weight
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compiler import needs_compiler

pytestmark = needs_compiler

HEAD = (
    '#include "layer.h"\n'
    'extern "C" void run(const void* const* constants, const Weight* weights, '
    "const Attention* attention, const Call* call) {\n"
    "const auto* inputs = call->inputs; auto* outputs = call->outputs;\n"
    "const int64_t tokens = call->tokens; const int threads = call->threads;\n"
)
EACH = "for (int64_t i = 0; i < tokens; ++i) narrow({code}, static_cast<{type}*>(outputs[0])[i]);"


def addresses(*tensors: Tensor) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def call(inputs: list[Tensor], outputs: list[Tensor], tokens: int) -> tuple[int, object]:
    """Return the address of a C++ call, and the objects that must live as long."""
    arrays = addresses(*inputs), addresses(*outputs)
    structure = Call(*map(ctypes.addressof, arrays), None, None, tokens, 1)
    return ctypes.addressof(structure), (structure, arrays)


def computed(code: str, numbers: Tensor) -> Tensor:
    """Evaluate a C++ expression for every number."""
    kind = "float" if numbers.dtype == torch.float32 else "bfloat16"
    text = code.format(f"number(static_cast<const {kind}*>(inputs[0])[i])")
    run = build_layer("\n".join([HEAD, EACH.format(code=text, type=kind), "}"]))
    found = torch.empty_like(numbers)
    address, _alive = call([numbers], [found], numbers.numel())
    run(None, None, None, address)
    return found


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("exp_of({})", torch.exp),
        ("sigmoid_of({})", torch.sigmoid),
        ("silu_of({})", F.silu),
        ("tanh_of({})", torch.tanh),
        ("gelu_none_of({})", F.gelu),
        ("gelu_tanh_of({})", nn.GELU("tanh")),
        ("square({})", torch.square),
        ("cube({})", lambda x: x**3),
    ],
)
def test_functions(code: str, function: object) -> None:
    small = torch.linspace(-20, 20, 4001)
    large = torch.tensor([-200.0, -100.0, -87.5, 0.0, 87.5, torch.nan])
    for numbers in (small, large):
        expected = function(numbers)  # type: ignore[operator]
        torch.testing.assert_close(
            computed(code, numbers), expected, atol=1e-6, rtol=2e-6, equal_nan=True
        )


def test_numbers_are_rounded_as_pytorch_rounds_them() -> None:
    wide = torch.randn(1000) * torch.logspace(-30, 30, 1000)
    assert torch.equal(computed("rounded({})", wide), wide.bfloat16().float())
    assert torch.equal(computed("{}", wide.bfloat16()), wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [False, True])
def test_products(dtype: torch.dtype, is_packed: bool) -> None:
    kind = "float" if dtype == torch.float32 else "bfloat16"
    states, bias = torch.randn(5, 24, dtype=dtype), torch.randn(40, dtype=dtype)
    weight, found = torch.randn(40, 24, dtype=dtype), torch.empty(5, 40, dtype=dtype)
    run = build_layer(
        f"{HEAD} multiply(weights[0], static_cast<const {kind}*>(inputs[0]), inputs[1], "
        f"static_cast<{kind}*>(outputs[0]), tokens, 24, 40, threads); }}"
    )
    used = pack_weight(weight) if is_packed else weight
    table = (Weight * 1)(weight_of(used))
    address, _alive = call([states, bias], [found], 5)
    run(None, table, None, address)
    expected = F.linear(states.float(), weight.float(), bias.float())
    torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-2)


def test_what_attention_is_told() -> None:
    told = Attention.of(torch.float32)
    assert told.write
    assert told.attend
    buffer = torch.empty(2, 3, 5, 7)
    told.keys.point_to(buffer)
    storage: Storage = told.keys
    assert storage.numbers == buffer.data_ptr()
    assert (storage.slot, storage.head, storage.entry) == (105, 35, 7)


def test_what_is_no_program() -> None:
    with pytest.raises(BuildError, match=r"decoder_layer\.cpp:1"):
        build_layer("not C++")
