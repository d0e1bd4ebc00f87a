"""The interpreter accepts what the compiler may not: kernels are compiled, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What every kernel has to fit in with its default tile sizes, in bytes: GPUs of capability 7.5.
SHARED_MEMORY = 64 * 1024
KERNELS = {
    "ragged_tree_attention_kernel",
    "add_splits_kernel",
    "kv_write_kernel",
    "kv_keep_kernel",
    "chunk_kernel",
    "walk_kernel",
    "draft_features_kernel",
    "forward_kernel",
    "backward_kernel",
}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    environment.pop("TRITON_INTERPRET", None)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_offline", "80"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert {name for name, _ in lines} == KERNELS
    assert max(int(shared) for _, shared in lines) <= SHARED_MEMORY
