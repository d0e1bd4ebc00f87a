"""Compile GPU kernels without a GPU, and read the resources that they need.

Launches inside `compiling` only compile their kernels, with the arguments of the launch. Kernels
must not be interpreted: start the process without `TRITON_INTERPRET`.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# NVIDIA multiprocessor: registers, allocation unit per warp, and shared memory that is reserved per
# block (CUDA C++ Programming Guide, compute capabilities).
REGISTERS, REGISTER_UNIT, BLOCK_SHARED = 65_536, 256, 1024

_devices = itertools.count()


@dataclass(frozen=True)
class Gpu:
    """A GPU to compile for, and the limits of one multiprocessor.

    Attributes:
        name: product name.
        target: `cuda:` and the compute capability, or `hip:` and the architecture.
        processors: number of multiprocessors.
        shared: bytes of shared memory per multiprocessor.
        warps: largest number of resident warps.
        blocks: largest number of resident blocks.
    """

    name: str
    target: str
    processors: int
    shared: int
    warps: int
    blocks: int


GPUS = {
    "sm_89": Gpu("RTX 4090", "cuda:89", 128, 100 * 1024, 48, 24),
    "sm_90": Gpu("H100", "cuda:90", 132, 228 * 1024, 64, 32),
    "sm_100": Gpu("B200", "cuda:100", 148, 228 * 1024, 64, 32),
}


@dataclass(frozen=True)
class Compiled:
    """A launch: its kernel, its grid, and the resources of one block.

    Attributes:
        kernel: name of the kernel.
        grid: programs per axis.
        warps: warps per block.
        registers: registers per thread; 0 if unknown.
        spilled: bytes per thread that are spilled from registers.
        shared: bytes of shared memory per block.
        widest: bytes of the widest load from global memory; 0 if unknown.
        tf32: True if float32 inputs of a matmul are rounded to TF32.
        matmul: instruction of the matmuls, `wgmma`, `tcgen05` or `mma`; several are joined by
            "+"; empty if there are none.
    """

    kernel: str
    grid: tuple[int, ...]
    warps: int
    registers: int
    spilled: int
    shared: int
    widest: int
    tf32: bool
    matmul: str


def blocks_per_processor(compiled: Compiled, gpu: Gpu) -> int:
    """Return the number of blocks that an NVIDIA multiprocessor runs at a time."""
    per_warp = -(-compiled.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        REGISTERS // (per_warp * compiled.warps),
        gpu.shared // (compiled.shared + BLOCK_SHARED),
        gpu.warps // compiled.warps,
        gpu.blocks,
    )


class _NoGPU:
    """Minimal Triton driver for compiling without a GPU."""

    def __init__(self, target: GPUTarget):
        self.target = target
        # Triton caches kernels by device regardless of the target, so each driver needs a new one.
        self.device = next(_devices)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(target: str) -> Iterator[list[Compiled]]:
    """Compile the block's launches for `target`; the yielded list receives an entry per launch."""
    kind, _, name = target.partition(":")
    is_nvidia = kind == "cuda"
    arch, warp_size = (int(name), 32) if is_nvidia else (name, 64)
    driver.set_active(_NoGPU(GPUTarget(kind, arch, warp_size)))
    launch, launches = JITFunction.run, list[Compiled]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        resources = _of_nvidia(compiled.asm) if is_nvidia else _of_amd(compiled.asm)
        data = compiled.metadata
        launches.append(
            Compiled(
                kernel=self.__name__,
                grid=tuple(grid),
                warps=data.num_warps,
                shared=data.shared,
                **resources,
            )
        )

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = launch


def _of_nvidia(asm: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ptx = asm["ptx"]
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    matmuls = [name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in ptx]
    return {
        "registers": max(map(int, re.findall(r"REG:(\d+)", usage))),
        # No kernel has arrays per thread, so everything on the stack was spilled.
        "spilled": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "widest": max((int(many or 1) * int(bits) // 8 for many, bits in loads), default=0),
        "tf32": "tf32" in ptx,
        "matmul": "+".join(name.partition(".")[0] for name in matmuls),
    }


def _of_amd(asm: Any) -> dict[str, Any]:
    text = asm["amdgcn"]
    # Scalar registers spill to vector registers; vector registers spill to memory, 4 bytes each.
    spilled = 4 * sum(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)))
    return {"registers": 0, "spilled": spilled, "widest": 0, "tf32": "xf32" in text, "matmul": ""}
