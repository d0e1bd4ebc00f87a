"""Random ragged batches of token trees, as tensors of the attention op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from hf_spec_kernels import RaggedLayout
from hf_spec_kernels.ragged_tree_attention import pack_bits
from torch import Tensor

# Number of committed tokens, and parents of the nodes after them, -1 for a root. A chain, a tree
# whose keys fill several bytes of bits, a single root at position 0, a finished row, an unsorted
# tree.
ROWS: list[tuple[int, list[int]]] = [
    (5, [-1, 0, 1]),
    (37, [-1, 0, 0, 1, 1, 2, 5, 5, 0, 3]),
    (0, [-1]),
    (9, []),
    (18, [-1, 0, 0, 0, 2, 1]),
]


@dataclass
class Shape:
    """Heads of a batch."""

    kv_heads: int = 2
    groups: int = 2
    head: int = 16
    value_head: int = 16


@dataclass
class Case:
    """Arguments of the op, and the cache indices that each query attends to."""

    query: Tensor
    keys: Tensor
    values: Tensor
    layout: RaggedLayout
    seen: list[list[int]] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, RaggedLayout]:
        return self.query, self.keys, self.values, self.layout


def make_case(
    rows: Sequence[tuple[int, list[int]]] = ROWS,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    spare: int = 3,
    first_known: int = 0,
) -> Case:
    """Return a random batch.

    Args:
        rows: see `ROWS`; row i is stored in slot `len(rows) - i`, slot 0 stays free.
        shape: numbers and sizes of heads.
        dtype: dtype of queries, keys and values.
        device: device of all tensors.
        spare: number of cache indices after the longest row; all unused ones hold NaN.
        first_known: number of committed keys per row that are given by bits, not by the prefix.
    """
    shape = shape or Shape()
    torch.manual_seed(0)
    total = sum(len(parents) for _, parents in rows)
    most = max((committed + len(parents) for committed, parents in rows), default=0)
    num_slots = len(rows) + 1
    heads = shape.kv_heads * shape.groups
    query = torch.randn(total, heads, shape.head)
    keys = torch.full((num_slots, shape.kv_heads, most + spare, shape.head), torch.nan)
    values = torch.full((num_slots, shape.kv_heads, most + spare, shape.value_head), torch.nan)
    seen, positions, key_positions, prefixes, visible = [], [], [], [], []
    for index, (committed, parents) in enumerate(rows):
        slot, used = num_slots - 1 - index, committed + len(parents)
        keys[slot, :, :used] = torch.randn(shape.kv_heads, used, shape.head)
        values[slot, :, :used] = torch.randn(shape.kv_heads, used, shape.value_head)
        prefix = max(0, committed - first_known)
        depth: list[int] = []
        paths: list[list[int]] = []
        for node, above in enumerate(parents):
            depth.append(0 if above < 0 else depth[above] + 1)
            paths.append([*(paths[above] if above >= 0 else range(committed)), committed + node])
            line = torch.zeros(most, dtype=torch.bool)
            line[torch.tensor(paths[-1]) - prefix] = True
            line[used - prefix :] = False
            visible.append(line)
        seen += paths
        positions += [committed + d for d in depth]
        key_positions += [*range(prefix, committed), *(committed + d for d in depth)]
        prefixes.append(prefix)

    def ints(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    lengths = [len(parents) for _, parents in rows]
    used_entries = [committed + len(parents) for committed, parents in rows]
    tails = [used - prefix for used, prefix in zip(used_entries, prefixes, strict=True)]
    layout = RaggedLayout(
        slot=ints([num_slots - 1 - index for index in range(len(rows))]),
        query_start=ints([0, *accumulate(lengths)]),
        num_keys=ints(used_entries),
        prefix=ints(prefixes),
        bits=pack_bits(torch.stack(visible) if visible else torch.zeros(0, 1).bool()).to(device),
        position=ints(positions),
        first_position=ints([0] * len(rows)),
        key_position=ints(key_positions),
        key_start=ints([0, *accumulate(tails)][:-1]),
        max_queries=max(lengths, default=0),
        max_keys=most,
    )
    moved = (tensor.to(dtype).to(device) for tensor in (query, keys, values))
    return Case(*moved, layout, seen)
