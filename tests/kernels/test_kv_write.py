"""Writing keys and values: every token at its index, nothing else changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_spec_kernels import kv_write, launches
from torch import Tensor

from tests.compiler import needs_compiler
from tests.kernels.moved import moved

# Slot and cache index of seven tokens, in any order and with gaps; slot -1 skips a token.
SLOT_MAPPING = [[0, 0, 2, -1, 1, 2, 0], [3, 4, 9, 1, 15, 0, 12]]


def states(heads: int = 2, head: int = 8, value_head: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "key": torch.randn(7, heads, head),
        "value": torch.randn(7, heads, value_head),
        "keys": torch.full((3, heads, 16, head), torch.nan),
        "values": torch.full((3, heads, 16, value_head), torch.nan),
        "slot_mapping": torch.tensor(SLOT_MAPPING, dtype=torch.int32),
    }


def written(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the expected contents of the buffers, computed by a loop."""
    keys, values = arguments["keys"].clone(), arguments["values"].clone()
    for token, (slot, entry) in enumerate(zip(*arguments["slot_mapping"].tolist(), strict=True)):
        if slot >= 0:
            keys[slot, :, entry] = arguments["key"][token]
            values[slot, :, entry] = arguments["value"][token]
    return keys, values


def check(arguments: dict[str, Tensor], impl: str) -> None:
    expected = written(arguments)
    kv_write(**arguments, impl=impl)
    for name, right in zip(("keys", "values"), expected, strict=True):
        assert torch.equal(arguments[name].nan_to_num(7.5), right.nan_to_num(7.5))


def test_the_reference() -> None:
    check(states(), "torch")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 8, 6), (3, 80, 80), (8, 128, 256)])
def test_the_kernel(sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> None:
    arguments = {
        name: tensor.to(device) if name == "slot_mapping" else tensor.to(device, dtype)
        for name, tensor in states(*sizes).items()
    }
    before = launches["kv_write"]
    check(arguments, "triton")
    assert launches["kv_write"] == before + 1


@needs_compiler
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 8, 6), (3, 80, 80)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_of_a_cpu(sizes: tuple[int, int, int], kind: torch.dtype) -> None:
    arguments = {
        name: tensor if name == "slot_mapping" else tensor.to(kind)
        for name, tensor in states(*sizes).items()
    }
    before = launches["kv_write"]
    check(arguments, "cpp")
    assert launches["kv_write"] == before + 1


@needs_compiler
def test_strides_are_free_on_a_cpu() -> None:
    strides_are_free(torch.device("cpu"), "cpp")


def test_strides_are_free(device: torch.device) -> None:
    strides_are_free(device, "triton")


def strides_are_free(device: torch.device, impl: str) -> None:
    """Check states with heads before tokens, as in attention layers, and strided buffers."""
    arguments = {name: tensor.to(device) for name, tensor in states().items()}
    for name in ("key", "value"):
        arguments[name] = arguments[name].transpose(0, 1).contiguous().transpose(0, 1)
    pool = torch.zeros(6, 2, 32, 8, device=device)
    arguments["keys"] = pool[::2, :, ::2]
    check(arguments, impl)
    assert not pool[1::2].any()
    assert not pool[:, :, 1::2].any()


def test_no_tokens(device: torch.device) -> None:
    arguments = {name: tensor.to(device) for name, tensor in states().items()}
    arguments |= {"key": arguments["key"][:0], "value": arguments["value"][:0]}
    kv_write(**{**arguments, "slot_mapping": arguments["slot_mapping"][:, :0]}, impl="triton")
    assert arguments["keys"].isnan().all()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"value": torch.randn(6, 2, 6)}, ValueError, "value has shape"),
        ({"keys": torch.randn(3, 2, 16, 7)}, ValueError, "keys has shape"),
        ({"values": torch.randn(3, 2, 15, 6)}, ValueError, "values has shape"),
        ({"keys": torch.randn(3, 2, 16, 8).half()}, TypeError, "keys is torch.float16"),
        ({"slot_mapping": torch.zeros(2, 7).long()}, TypeError, "slot_mapping is torch.int64"),
        ({"slot_mapping": torch.zeros(7, 2).int().T}, ValueError, "slot_mapping has strides"),
        (
            {"slot_mapping": torch.zeros(2, 14).int()[:, :7]},
            ValueError,
            "slot_mapping must be contiguous",
        ),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    change: dict[str, Any], error: type[Exception], match: str, device: torch.device
) -> None:
    arguments = {name: moved(value, device) for name, value in (states() | change).items()}
    with pytest.raises(error, match=match):
        kv_write(**arguments, impl="triton")
