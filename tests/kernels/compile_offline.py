"""Compile kernels for a GPU that need not be there, from the launchers' own arguments.

A program for `test_compiles`: it prints a line of JSON per kernel, see `Compiled`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from hf_spec_kernels import DistillWeights, Moves, RaggedLayout, Scoring
from hf_spec_kernels.configs import config_file
from hf_spec_kernels.distill_loss.kernel import distill_loss
from hf_spec_kernels.draft_features.kernel import draft_features
from hf_spec_kernels.kv_keep.kernel import kv_keep
from hf_spec_kernels.kv_write.kernel import kv_write
from hf_spec_kernels.ragged_tree_attention.kernel import ragged_tree_attention
from hf_spec_kernels.verify_tree.kernel import verify_tree
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"16bit": torch.bfloat16, "32bit": torch.float32}
EVERYTHING = Scoring(0.1, 9, 5.0, torch.zeros(8), torch.zeros(8))


@dataclass
class Compiled:
    """What a kernel became.

    Attributes:
        case: what it was compiled for.
        kernel: its name.
        shared: bytes of shared memory.
        spilled: bytes per thread that did not fit in registers.
        widest: bytes of the widest load from memory; 0 where nobody counted.
        tf32: whether products of float32 are rounded first.
    """

    case: str
    kernel: str
    shared: int
    spilled: int
    widest: int
    tf32: bool


class NoGPU:
    """As much of a driver as compiling asks."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(launch: Any, case: list[str]) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        look_at = of_nvidia if "cubin" in compiled.asm else of_amd
        spilled, widest, tf32 = look_at(compiled.asm)
        found = Compiled(case[0], self.__name__, compiled.metadata.shared, spilled, widest, tf32)
        print(json.dumps(asdict(found)))  # noqa: T201 - what the test reads

    return run


def of_nvidia(asm: Any) -> tuple[int, int, bool]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Nothing here keeps arrays per thread: what is on the stack was spilled.
    spilled = sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage)))
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", asm["ptx"])
    widest = max((int(many or 1) * int(bits) // 8 for many, bits in loads), default=0)
    return spilled, widest, "tf32" in asm["ptx"]


def of_amd(asm: Any) -> tuple[int, int, bool]:
    text = asm["amdgcn"]
    # Scalar registers are spilled to others; these go to memory, four bytes each.
    spilled = 4 * sum(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)))
    return spilled, 0, "xf32" in text


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def attend(head: int, nodes: int, dtype: torch.dtype, scoring: Scoring, num_splits: int) -> None:
    query = zeros(nodes, 8, head, dtype=dtype)
    keys = zeros(2, 2, 64, head, dtype=dtype)
    bits, key_position = zeros(nodes, 2, dtype=torch.uint8), zeros(64)
    layout = RaggedLayout(
        slot=zeros(1),
        query_start=zeros(2),
        num_keys=zeros(1),
        prefix=zeros(1),
        bits=bits,
        position=zeros(nodes),
        first_position=zeros(1),
        key_position=key_position,
        key_start=zeros(1),
        max_queries=nodes,
        max_keys=64,
    )
    ragged_tree_attention(query, keys, keys, layout, scoring, num_splits)


def keep(dtype: torch.dtype, head: int) -> None:
    pool = zeros(2, 2, 64, head, dtype=dtype)
    kv_keep([pool, pool], Moves(zeros(1), zeros(1), zeros(3), zeros(2), 3))


def write() -> None:
    states, pool = zeros(7, 2, 80, dtype=torch.bfloat16), zeros(2, 2, 64, 80, dtype=torch.bfloat16)
    kv_write(states, states, pool, pool, zeros(2, 7))


def over_the_vocabulary() -> None:
    logits = zeros(5, 50_000, dtype=torch.bfloat16)
    nodes = zeros(5, dtype=torch.long)
    for uniforms in (None, torch.zeros(5)):
        verify_tree(logits, nodes, nodes, nodes[:3], 4, uniforms)
    draft_features(logits.float(), 10)
    distill_loss(logits.requires_grad_(), logits.detach(), nodes, DistillWeights()).backward()


def every_kernel() -> dict[str, Callable[[], None]]:
    """One case or more of each, and the two that were once found wrong."""
    return {
        "all that scores": lambda: attend(80, 4, torch.float16, EVERYTHING, 4),
        "head128_16bit_many": lambda: attend(128, 40, torch.bfloat16, Scoring(), 1),
        "head64_32bit_few": lambda: attend(64, 4, torch.float32, Scoring(), 1),
        "write": write,
        "keep": lambda: keep(torch.bfloat16, 64),
        "vocabulary": over_the_vocabulary,
    }


def every_config() -> dict[str, Callable[[], None]]:
    """Tree attention by every line of its default tile sizes, with all that scores and without."""
    cases = {}
    for key in json.loads(config_file("ragged_tree_attention", "default").read_text()):
        head, bits, rows = key.removeprefix("head").split("_")
        nodes = 4 if rows == "few" else 40
        for name, scoring in (("", Scoring()), (" all", EVERYTHING)):
            given = (int(head), nodes, DTYPES[bits], scoring, 4 if rows == "few" else 1)
            cases[key + name] = lambda given=given: attend(*given)
    return cases


def products_of_float32() -> dict[str, Callable[[], None]]:
    """One that was rounded on some GPUs."""
    return {"head128_32bit_many": every_config()["head128_32bit_many"]}


CASES = {"kernels": every_kernel, "configs": every_config, "float32": products_of_float32}


def main(target: str, which: str) -> None:
    kind, _, name = target.partition(":")
    arch: int | str = int(name) if kind == "cuda" else name
    driver.set_active(NoGPU(GPUTarget(kind, arch, 32 if kind == "cuda" else 64)))
    case = [""]
    JITFunction.run = compile_only(JITFunction.run, case)
    for case[0], compile_it in CASES[which]().items():
        compile_it()


if __name__ == "__main__":
    main(*sys.argv[1:])
