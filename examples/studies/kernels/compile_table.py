"""Table of registers, spills, shared memory and blocks per multiprocessor of a round's kernels.

No GPU is needed. Kernels are compiled for the shapes of real models, with the arguments that the
launchers choose. Run as `python -m examples.studies.kernels.compile_table`; `--help` lists the
options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hf_spec_kernels import Moves, RaggedLayout, Scoring
from hf_spec_kernels.draft_features.kernel import draft_features
from hf_spec_kernels.filter_scores.kernel import filter_scores
from hf_spec_kernels.kv_keep.kernel import kv_keep
from hf_spec_kernels.kv_write.kernel import kv_write
from hf_spec_kernels.ragged_tree_attention import kernel as attention
from hf_spec_kernels.verify_tree.kernel import verify_tree
from torch import Tensor

from examples.studies.kernels.offline import GPUS, Compiled, Gpu, blocks_per_processor, compiling
from hf_spec.common.files import write_json
from hf_spec.common.tables import Table

# Nodes of one row, and tokens of a prompt chunk, which uses the kernel if heads have sinks.
NODES = (1, 4, 8, 16, 64)
PROMPT = 2048
CONTEXTS = (512, 8192)
SHOWN_NODES = (4, 16, PROMPT)
# Compared tiles: rows (nodes times query heads per key head) and warps.
TILES = ((16, 4), (32, 4), (64, 4), (64, 8))
TILE_HEADS = (64, 128, 256)
TILE_GPU = "sm_90"


@dataclass(frozen=True)
class Layers:
    """Attention of one kind of layer: query and key heads, head size, and scoring."""

    name: str
    heads: int
    kv_heads: int
    head: int
    window: int | None = None
    sinks: bool = False

    def scoring(self) -> Scoring:
        """Return the scoring of these layers."""
        return Scoring(window=self.window, sinks=torch.zeros(self.heads) if self.sinks else None)


LAYERS = (
    Layers("Llama-3.1-8B, Qwen3-4B, Qwen3-8B", 32, 8, 128),
    Layers("Gemma 3 4B, window", 8, 4, 256, 1024),
    Layers("Gemma 3 4B, full", 8, 4, 256),
    Layers("Gemma 4 E4B, full", 8, 2, 512),
    Layers("gpt-oss-20b and 120b, window", 64, 8, 64, 128, sinks=True),
    Layers("gpt-oss-20b and 120b, full", 64, 8, 64, sinks=True),
)
VOCABULARIES = {"Llama-3.1": 128_256, "Qwen3": 151_936, "Gemma 3": 262_208, "gpt-oss": 201_088}


@dataclass(frozen=True)
class Row:
    """A compiled kernel with its GPU, launch shape, and resources."""

    gpu: str
    shape: str
    nodes: int
    context: int
    blocks_per_processor: int
    compiled: Compiled


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return zeros, int32 by default as in launches."""
    return torch.zeros(*shape, dtype=dtype)


def attend(
    query: Tensor, keys: Tensor, scoring: Scoring, context: int, num_splits: int | None = None
) -> None:
    """Launch attention of (N, H, D) nodes of a single row after `context` tokens."""
    nodes = query.shape[0]
    layout = RaggedLayout(
        slot=zeros(1),
        query_start=zeros(2),
        num_keys=zeros(1),
        prefix=zeros(1),
        bits=zeros(nodes, -(-nodes // 8), dtype=torch.uint8),
        position=zeros(nodes),
        first_position=zeros(1),
        key_position=zeros(nodes),
        key_start=zeros(1),
        max_queries=nodes,
        max_keys=context + nodes,
    )
    attention.ragged_tree_attention(query, keys, keys, layout, scoring, num_splits)


def attention_rows(name: str, gpu: Gpu, nodes: Sequence[int]) -> Iterator[Row]:
    """Compile attention for every kind of layer and number of nodes; yield a row per launch."""
    dtype = torch.bfloat16
    processors = mock.patch.object(attention, "num_processors", return_value=gpu.processors)
    for layers in LAYERS:
        for count in nodes if layers.sinks else [count for count in nodes if count < PROMPT]:
            for context in CONTEXTS:
                query = zeros(count, layers.heads, layers.head, dtype=dtype)
                keys = zeros(1, layers.kv_heads, 1, layers.head, dtype=dtype)
                with compiling(gpu.target) as launches, processors:
                    attend(query, keys, layers.scoring(), context)
                for compiled in launches:
                    yield _row(name, layers.name, count, context, compiled)


def tile_rows() -> Iterator[Row]:
    """Compile attention over 16 nodes with tiles of other sizes, 32 keys wide, in two stages."""
    gpu = GPUS[TILE_GPU]
    processors = mock.patch.object(attention, "num_processors", return_value=gpu.processors)
    for layers in (next(one for one in LAYERS if one.head == head) for head in TILE_HEADS):
        query = zeros(16, layers.heads, layers.head, dtype=torch.bfloat16)
        keys = zeros(1, layers.kv_heads, 1, layers.head, dtype=torch.bfloat16)
        for rows, warps in TILES:
            sizes = {"BLOCK_M": rows, "BLOCK_N": 32, "num_warps": warps, "num_stages": 2}
            tile = mock.patch.object(attention, "config", return_value={**sizes, "min_split": 64})
            with compiling(gpu.target) as launches, processors, tile:
                attend(query, keys, Scoring(), 512)
            yield _row(TILE_GPU, f"head {layers.head}, {rows} rows", 16, 512, launches[0])


def other_rows(name: str, gpu: Gpu, nodes: int = 16) -> Iterator[Row]:
    """Compile the other kernels of a round: KV writes and moves, verification, draft features."""
    dtype = torch.bfloat16
    for heads, head in sorted({(layers.kv_heads, layers.head) for layers in LAYERS}):
        states, pool = (
            zeros(nodes, heads, head, dtype=dtype),
            zeros(1, heads, 64, head, dtype=dtype),
        )
        with compiling(gpu.target) as launches:
            kv_write(states, states, pool, pool, zeros(2, nodes))
            kv_keep([pool, pool], Moves(zeros(1), zeros(1), zeros(nodes), zeros(2), nodes))
        for compiled in launches:
            yield _row(name, f"{heads} heads of {head}", nodes, 0, compiled)
    for model, size in VOCABULARIES.items():
        logits, tree = zeros(nodes, size, dtype=dtype), zeros(nodes, dtype=torch.long)
        with compiling(gpu.target) as launches:
            sampled = (torch.zeros(nodes), None), (torch.zeros(nodes, 2), logits.float())
            for uniforms, draft_probs in ((None, None), *sampled):
                verify_tree(logits, tree, tree, tree[:2], nodes, uniforms, draft_probs)
            filter_scores(logits, torch.ones(nodes, 4))
            draft_features(logits.float(), 10)
        for compiled in launches:
            yield _row(name, f"{model}, {size} tokens", nodes, 0, compiled)


def table(rows: Sequence[Row]) -> str:
    """Return Markdown: registers / spilled bytes / shared KiB / blocks / matmul: programs."""
    names = sorted({row.gpu for row in rows}, key=list(GPUS).index)
    lines = []
    for layers in LAYERS:
        for nodes in SHOWN_NODES:
            mine = [
                row
                for row in rows
                if (row.shape, row.nodes) == (layers.name, nodes)
                and row.compiled.kernel == "ragged_tree_attention_kernel"
            ]
            cells = [_cell([row for row in mine if row.gpu == name]) for name in names]
            if mine:
                lines.append([layers.name, str(nodes), *cells])
    return Table(["layers", "nodes", *names], lines).markdown()


def tile_table(rows: Sequence[Row]) -> str:
    """Return Markdown with the resources of each tile, in the same order."""
    lines = [[row.shape, str(row.compiled.warps), _needs(row)] for row in rows]
    return Table(["tile", "warps", TILE_GPU], lines).markdown()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; print the tables and write every launch as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.kernels.compile_table", description=__doc__
    )
    parser.add_argument("--gpu", action="append", choices=list(GPUS), help="all by default")
    parser.add_argument("--nodes", type=int, action="append", help="of attention")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    rows = []
    for name in options.gpu or GPUS:
        gpu = GPUS[name]
        rows += attention_rows(name, gpu, options.nodes or (*NODES, PROMPT))
        rows += other_rows(name, gpu)
    tiles = [] if options.nodes or TILE_GPU not in (options.gpu or GPUS) else list(tile_rows())
    print(table(rows), tile_table(tiles), sep="\n\n")
    if options.out:
        record = {"rows": [asdict(row) for row in rows], "tiles": [asdict(row) for row in tiles]}
        write_json(options.out, {"versions": _versions(), **record})


def _row(name: str, shape: str, nodes: int, context: int, compiled: Compiled) -> Row:
    return Row(name, shape, nodes, context, blocks_per_processor(compiled, GPUS[name]), compiled)


def _cell(rows: Sequence[Row]) -> str:
    """Return the resources of launches that differ only in context, and thus in their grid."""
    parts = []
    for row in rows:
        grid = row.compiled.grid
        parts.append((_needs(row), grid[0] * grid[1] * grid[2]))
    texts = dict.fromkeys(text for text, _ in parts)
    return "; ".join(texts) + ": " + ", ".join(str(programs) for _, programs in parts)


def _needs(row: Row) -> str:
    needs = row.compiled
    resources = (needs.registers, needs.spilled, needs.shared >> 10, row.blocks_per_processor)
    return " / ".join(map(str, (*resources, needs.matmul)))


def _versions() -> dict[str, Any]:
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main()
