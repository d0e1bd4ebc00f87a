"""Kernels compile, which the interpreter does not check; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
# Maximum bytes of shared memory per thread block.
SHARED_MEMORY = {
    "cuda:80": 163 * 1024,
    "cuda:89": 99 * 1024,
    "cuda:90": 227 * 1024,
    "cuda:100": 227 * 1024,
    "hip:gfx942": 64 * 1024,
}
# Maximum spilled bytes per thread; only shapes that no model of the table has may spill.
SPILLED = 128
# Prompt length in the table of compiled kernels.
PROMPT = 1024
KERNELS = {
    "ragged_tree_attention_kernel",
    "add_splits_kernel",
    "kv_write_kernel",
    "kv_keep_kernel",
    "chunk_kernel",
    "walk_kernel",
    "filter_kernel",
    "draft_features_kernel",
    "forward_kernel",
    "backward_kernel",
}
ROUND_KERNELS = KERNELS - {"forward_kernel", "backward_kernel"}
# Kernels that move keys and values with the widest loads and stores of a GPU.
WIDE = {"ragged_tree_attention_kernel", "kv_write_kernel", "kv_keep_kernel"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")


def compiling_environment(folder: Path) -> dict[str, str]:
    """Variables of a process that compiles kernels instead of interpreting them."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
        "TRITON_CACHE_DIR": str(folder),
    }
    environment.pop("TRITON_INTERPRET", None)
    return environment


def compiled(target: str, cases: str, folder: Path) -> list[SimpleNamespace]:
    """Compile the cases for a target, check every limit, and return a `Compiled` per kernel."""
    environment = compiling_environment(folder)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_offline", target, cases],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = [SimpleNamespace(**json.loads(line)) for line in finished.stdout.splitlines()]
    assert [one for one in found if one.shared > SHARED_MEMORY[target]] == []
    assert [one for one in found if one.spilled > SPILLED] == []
    assert [one for one in found if one.tf32] == [], "products of float32 were rounded"
    return found


@pytest.mark.full
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    found = compiled("cuda:80", "kernels", tmp_path)
    assert {one.kernel for one in found} == KERNELS
    assert {one.widest for one in found if one.kernel in WIDE} == {16}


@pytest.mark.full
def test_products_of_float32_stay_what_they_are(tmp_path: Path) -> None:
    """On these GPUs, tiles of 64 rows run on tensor cores, which would reduce float32 to TF32."""
    assert compiled("cuda:100", "float32", tmp_path)


def compile_table(folder: Path, *options: str) -> list[SimpleNamespace]:
    """Generate the table of compiled kernels with these options, and return its rows."""
    out = folder / "table.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "examples.studies.kernels.compile_table"),
            *(*options, "--out", str(out)),
        ],
        cwd=ROOT,
        env=compiling_environment(folder),
        capture_output=True,
        check=True,
    )
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return [SimpleNamespace(**{**row, **row["compiled"]}) for row in rows]


def assert_two_blocks_without_spills(rows: list[SimpleNamespace]) -> None:
    assert [row for row in rows if row.spilled] == []
    drafts = [row for row in rows if 4 < row.nodes < PROMPT]
    assert [row for row in drafts if row.blocks_per_processor < 2] == []


@pytest.mark.full
def test_drafts_have_two_blocks_per_multiprocessor(tmp_path: Path) -> None:
    rows = compile_table(tmp_path, "--gpu", "sm_90", "--nodes", "16")
    assert {row.kernel for row in rows} == ROUND_KERNELS
    assert_two_blocks_without_spills(rows)


@pytest.mark.slow
def test_no_shape_spills_on_any_gpu(tmp_path: Path) -> None:
    rows = compile_table(tmp_path)
    assert {row.gpu for row in rows} == {"sm_89", "sm_90", "sm_100"}
    assert_two_blocks_without_spills(rows)


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["kernels", "configs"])
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_every_configuration_compiles_for_every_gpu(
    target: str, cases: str, tmp_path: Path
) -> None:
    assert compiled(target, cases, tmp_path)
