"""Peak memory: what was needed for a while is seen, and forgotten afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_spec.evaluation.bench.timing import peak_bytes, reset_peak

CPU = torch.device("cpu")
BLOCK_BYTES = 1 << 28


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks")
def test_a_block_that_was_held_for_a_while() -> None:
    reset_peak(CPU)
    before = peak_bytes(CPU)
    block = torch.ones(BLOCK_BYTES // 4)
    del block
    held = peak_bytes(CPU)
    reset_peak(CPU)
    after = peak_bytes(CPU)
    assert before is not None
    assert held is not None
    assert after is not None
    assert held - before > 0.9 * BLOCK_BYTES
    assert held - after > 0.9 * BLOCK_BYTES


def test_devices_that_do_not_tell() -> None:
    reset_peak(torch.device("meta"))
    assert peak_bytes(torch.device("meta")) is None


@pytest.mark.gpu
def test_a_block_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    reset_peak(device)
    before = peak_bytes(device)
    block = torch.ones(BLOCK_BYTES // 4, device=device)
    del block
    assert (peak_bytes(device) or 0) - (before or 0) >= BLOCK_BYTES
