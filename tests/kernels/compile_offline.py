"""Compile every kernel for a GPU that need not be there, from the launchers' own arguments.

A program for `test_compiles`: it prints a line per kernel with the shared memory that it takes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from hf_spec_kernels import DistillWeights, Moves, RaggedLayout, Scoring
from hf_spec_kernels.distill_loss.kernel import distill_loss
from hf_spec_kernels.draft_features.kernel import draft_features
from hf_spec_kernels.kv_keep.kernel import kv_keep
from hf_spec_kernels.kv_write.kernel import kv_write
from hf_spec_kernels.ragged_tree_attention.launch import ragged_tree_attention
from hf_spec_kernels.verify_tree.kernel import verify_tree
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class NoGPU:
    """As much of a driver as compiling asks."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(launch: Any) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert compiled.asm["cubin"]
        print(self.__name__, compiled.metadata.shared)  # noqa: T201 - what the test reads

    return run


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


def main(capability: int) -> None:
    driver.set_active(NoGPU(capability))
    JITFunction.run = compile_only(JITFunction.run)
    everything = Scoring(0.1, 9, 5.0, torch.zeros(8), torch.zeros(8))
    attend(80, 4, torch.float16, everything, num_splits=4)
    attend(128, 40, torch.bfloat16, Scoring(), num_splits=1)
    attend(64, 4, torch.float32, Scoring(), num_splits=1)
    states, pool = zeros(7, 2, 80, dtype=torch.bfloat16), zeros(2, 2, 64, 80, dtype=torch.bfloat16)
    kv_write(states, states, pool, pool, zeros(2, 7))
    kv_keep([pool, pool], Moves(zeros(1), zeros(1), zeros(3), zeros(2), 3))
    logits = zeros(5, 50_000, dtype=torch.bfloat16)
    nodes = zeros(5, dtype=torch.long)
    for uniforms in (None, torch.zeros(5)):
        verify_tree(logits, nodes, nodes, nodes[:3], 4, uniforms)
    draft_features(logits.float(), 10)
    distill_loss(logits.requires_grad_(), logits.detach(), nodes, DistillWeights()).backward()


if __name__ == "__main__":
    main(int(sys.argv[1]))
