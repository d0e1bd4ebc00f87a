"""Blocks per multiprocessor, limited by registers, shared memory, warps, and a maximum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.studies.kernels.offline import GPUS, Compiled, blocks_per_processor

KERNEL = Compiled(
    kernel="some_kernel",
    grid=(1, 1, 1),
    warps=4,
    registers=32,
    spilled=0,
    shared=0,
    widest=16,
    tf32=False,
    matmul="mma",
)


@pytest.mark.parametrize(
    ("needs", "gpu", "blocks"),
    [
        # Four warps with 255 registers per thread take 32,768 of 65,536.
        ({"registers": 255}, "sm_90", 2),
        ({"registers": 128}, "sm_90", 4),
        # Registers are allocated in units of 256 per warp: 129 per thread count as 136.
        ({"registers": 129}, "sm_90", 3),
        ({"registers": 128, "warps": 8}, "sm_90", 2),
        ({"registers": 144, "warps": 8}, "sm_90", 1),
        # Each block takes 1 KiB of shared memory in addition to its own.
        ({"shared": 113 * 1024}, "sm_90", 2),
        ({"shared": 114 * 1024}, "sm_90", 1),
        ({"shared": 49 * 1024}, "sm_89", 2),
        ({"shared": 50 * 1024}, "sm_89", 1),
        ({"warps": 16}, "sm_89", 3),
        ({"warps": 1}, "sm_89", 24),
        ({"warps": 1}, "sm_100", 32),
    ],
)
def test_blocks_per_multiprocessor(needs: dict[str, int], gpu: str, blocks: int) -> None:
    assert blocks_per_processor(replace(KERNEL, **needs), GPUS[gpu]) == blocks
