"""Small model of linear layers, and its outputs with and without packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.backend.cpu import packed_gemm
from hf_spec.backend.cpu.packed_weights import clear_cpu_packing, set_cpu_packing
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears

WIDTH = 256


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Clear packed weights before and after the block, and their cached timings after it."""
    set_cpu_packing("auto")
    clear_cpu_packing()
    yield
    set_cpu_packing("auto")
    clear_cpu_packing()
    packed_gemm.served.clear()
    packed_gemm._most_rows.cache_clear()


class Tied(nn.Module):
    """Minimal language model: embedding, two linear layers, a head tied to the embedding."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(320, WIDTH)
        self.up = nn.Linear(WIDTH, 512, bias=bias)
        self.down = nn.Linear(512, WIDTH, bias=bias)
        self.head = nn.Linear(WIDTH, 320, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.down(F.silu(self.up(x))))


def assert_same(output: Tensor, expected: Tensor) -> None:
    """Check equality up to rounding, for values of size 50 after three matmuls."""
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def run(model: nn.Module, rows: int = 8) -> Tensor:
    return model(torch.arange(rows)[None] % 320)


@torch.no_grad()
def run_fast(model: nn.Module, rows: int = 8) -> Tensor:
    with install_packed_linears(model), use_packed_linears():
        return run(model, rows)
