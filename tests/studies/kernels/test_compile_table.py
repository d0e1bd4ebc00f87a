"""Record of compiled kernels: its contents, tables, and current tile sizes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hf_spec_kernels import configs

from examples.studies.kernels import compile_table
from examples.studies.kernels.compile_table import (
    LAYERS,
    NODES,
    PROMPT,
    TILE_HEADS,
    TILES,
    Row,
    table,
    tile_table,
)
from examples.studies.kernels.offline import GPUS, Compiled
from tests.kernels.test_compiles import ROOT, ROUND_KERNELS

FOLDER = ROOT / "examples" / "studies" / "kernels"


def recorded(part: str) -> list[Row]:
    record = json.loads((FOLDER / "compiled_kernels.json").read_text(encoding="utf-8"))
    return [Row(**{**row, "compiled": Compiled(**row["compiled"])}) for row in record[part]]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return recorded("rows")


def test_no_kernel_spills_registers(rows: list[Row]) -> None:
    assert [row for row in rows if row.compiled.spilled] == []


def test_drafts_have_two_blocks_per_multiprocessor(rows: list[Row]) -> None:
    found = [row for row in rows if 4 < row.nodes <= max(NODES)]
    assert {row.gpu for row in found} == set(GPUS)
    assert {row.compiled.kernel for row in found} == ROUND_KERNELS
    assert [row for row in found if row.blocks_per_processor < 2] == []


def test_a_short_context_gives_most_multiprocessors_a_program(rows: list[Row]) -> None:
    """Splits have 32 keys or more, so 512 keys give up to 16 per KV head and query tile."""
    for row in attention_of(rows, 8, 512):
        layers = next(layers for layers in LAYERS if layers.name == row.shape)
        keys = min(512, layers.window or 512)
        programs = row.compiled.grid[0] * row.compiled.grid[2]
        processors = GPUS[row.gpu].processors // layers.kv_heads
        assert programs >= min(processors, keys // 32)


def test_the_record_is_of_the_current_tiles(rows: list[Row]) -> None:
    sizes = json.loads(configs.config_file("ragged_tree_attention", "default").read_text())
    for nodes in (*NODES, PROMPT):
        for row in attention_of(rows, nodes, 512):
            layers = next(layers for layers in LAYERS if layers.name == row.shape)
            num_rows = nodes * layers.heads // layers.kv_heads
            kind = "few" if num_rows <= 16 else "some" if num_rows <= 1024 else "many"
            tile = sizes[f"head{layers.head}_16bit_{kind}"]
            assert row.compiled.warps == tile["num_warps"]
            assert row.compiled.grid[0] == -(-num_rows // tile["BLOCK_M"])


def test_tiles_of_64_rows_are_multiplied_by_warp_groups(rows: list[Row]) -> None:
    """`wgmma` needs 64 rows; tiles of drafts are smaller."""
    units = {"sm_89": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
    for nodes in (*NODES, PROMPT):
        for row in attention_of(rows, nodes, 512):
            assert row.compiled.matmul == (units[row.gpu] if nodes == PROMPT else "mma")
    tiles = recorded("tiles")
    shapes = [(head, *tile) for head in TILE_HEADS for tile in TILES]
    assert len(tiles) == len(shapes)
    for row, (head, height, warps) in zip(tiles, shapes, strict=True):
        assert row.shape == f"head {head}, {height} rows"
        assert row.compiled.warps == warps
        assert row.compiled.matmul == ("wgmma" if height == 64 else "mma")


def test_the_document_has_the_tables(rows: list[Row]) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert table(rows) in text
    assert tile_table(recorded("tiles")) in text


def test_cells_merge_what_differs_by_grid_only() -> None:
    needs = Compiled("ragged_tree_attention_kernel", (2, 8, 4), 4, 128, 0, 2048, 16, False, "mma")
    row = Row("sm_90", LAYERS[0].name, 4, 512, 4, needs)
    (line,) = table([row, row]).splitlines()[2:]
    assert line.endswith("| 128 / 0 / 2 / 4 / mma: 64, 64 |")


def test_an_unknown_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compile_table.main(["--gpu", "sm_1"])
    assert re.search("sm_1.*sm_89", capsys.readouterr().err)


def attention_of(rows: list[Row], nodes: int, context: int) -> list[Any]:
    kernel = "ragged_tree_attention_kernel"
    found = [
        row
        for row in rows
        if (row.compiled.kernel, row.nodes, row.context) == (kernel, nodes, context)
    ]
    # The kernel runs prompts only if the heads have sinks.
    kinds = [layers for layers in LAYERS if layers.sinks or nodes < PROMPT]
    assert len(found) == len(kinds) * len(GPUS)
    return found
