"""Fixtures that run tests on the CPU in Triton's interpreter and, with `-m gpu`, on a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hf_spec_kernels import has_triton


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device that the kernels of a test run on."""
    kind = request.param
    if not has_triton() and sys.platform != "linux":
        pytest.skip("Triton is made for Linux only")
    assert has_triton(), "Triton is missing: pip install -c constraints.txt -e '.[test]'"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kind == "cpu" and not interpreted:
        pytest.skip("kernels are compiled in this process; TRITON_INTERPRET=1 interprets them")
    if kind == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("needs a GPU, and a process without TRITON_INTERPRET")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return each dtype of the kernels."""
    return request.param


@pytest.fixture(autouse=True)
def bfloat16_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen bfloat16 to float32 in matmuls; the interpreter would multiply the stored integers.

    Products of bfloat16 numbers are exact in float32, in which GPUs accumulate them.
    """
    if not has_triton():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def widened(states: TensorHandle) -> TensorHandle:
        if states.dtype.scalar != tl.bfloat16:
            return states
        bits = states.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *args: Any) -> TensorHandle:
        return multiply(self, widened(a), widened(b), *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def nan_memory() -> Iterator[None]:
    """Fill new memory with NaN, which reveals elements that a kernel does not write."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
