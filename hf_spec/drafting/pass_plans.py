"""Passes of a draft that grows on a device, as the host knows them before any has run.

The number of nodes of each pass follows from the shape of the draft; see
`hf_spec.drafting.device_growth`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from hf_spec_kernels.ragged_tree_attention import pack_bits
from torch import Tensor

from hf_spec.drafting.rank_tree import Path
from hf_spec.drafting.tree_growth import TreeShape

# Most nodes of a row in a level that are chosen on the device. Wider levels are usually pruned, so
# padding all of them would cost more than synchronizing.
WIDEST = 32


@dataclass(frozen=True)
class PassPlan:
    """Shape of a pass, known in advance.

    Attributes:
        width: nodes of a row.
        picks: entries of the pass before, flattened over nodes, levels and ranks, that lead to each
            node: one per level of that pass. None where the most probable are chosen.
        index: `picks` as a tensor; None if those are all entries.
        own_bits: (width, bytes) uint8, as `RaggedLayout.bits`: each node itself. None if the host
            knows the parents of all nodes of the draft.
    """

    width: int
    picks: list[int] | None
    index: Tensor | None = None
    own_bits: Tensor | None = None


@dataclass(frozen=True)
class DevicePass:
    """Shape of a pass over all rows, known to the host before any pass has run.

    Attributes:
        rows: the A rows that grow.
        row_indices: (A,) int64, their indices among the rows of the pass before; None for the same
            rows.
        depth: depth of the nodes, 0 for the roots.
        levels, num_ranks: number of levels that the pass predicts, and of tokens each.
        parents: of the nodes of this pass and of those before, the same in each row, the root
            first: where in this list the parent is, -1 for the root. If the device chooses the
            nodes, only the depths that follow from it are right.
    """

    rows: list[int]
    plan: PassPlan
    row_indices: Tensor | None
    depth: int
    levels: int
    num_ranks: int
    parents: list[int]

    @property
    def chooses(self) -> bool:
        """True if the device chooses the nodes."""
        return self.plan.picks is None


class PassPlans:
    """The plans of drafts of one shape, for the `device` that chooses the nodes.

    Attributes:
        ends: (E,) token ids that end a sequence; None for none.
    """

    def __init__(self, shape: TreeShape, ends: Sequence[int], device: torch.device):
        self.shape = shape
        self.device = device
        self.ends = torch.tensor(ends) if ends else None
        self._plans: dict[tuple[int, int], list[PassPlan]] = {}

    def fit(self, depth: int) -> bool:
        """Return True if drafts of that depth can be planned, at little padding."""
        shape = self.shape
        if shape.merge_length is not None:
            return False
        if shape.whole:
            return True
        widths = [width for width, _ in _pass_picks(shape, shape.num_ranks, depth)]
        # Trees of ranks ignore `max_draft_nodes`.
        bounded = shape.tree is None and sum(widths) * shape.num_ranks >= shape.max_draft_nodes
        return max(widths) <= WIDEST and not bounded

    def of(self, num_ranks: int, depth: int) -> list[PassPlan]:
        """Return the plan of each pass if `num_ranks` tokens may follow each node.

        There are fewer passes than `depth` needs if no node has children below them.
        """
        key = num_ranks, depth
        if key not in self._plans:
            self._plans[key] = self._make(num_ranks, depth)
        return self._plans[key]

    def passes(self, limits: Mapping[int, int], num_ranks: int) -> list[DevicePass]:
        """Return the passes of drafts with row -> most levels, of which one is above 0."""
        plans, rows = self.of(num_ranks, max(limits.values())), list(limits)
        passes = [DevicePass(rows, plans[0], None, 0, self._levels(0), num_ranks, [-1])]
        for plan in plans[1:]:
            before = passes[-1]
            depth = before.depth + before.levels
            kept = [number for number, row in enumerate(before.rows) if limits[row] > depth]
            if not kept:
                break
            rows = [before.rows[number] for number in kept]
            index = None if len(rows) == len(before.rows) else torch.tensor(kept)
            first = len(before.parents) - before.plan.width
            picks = [0] * plan.width if plan.picks is None else plan.picks[:: before.levels]
            parents = [first + pick // (before.levels * num_ranks) for pick in picks]
            levels = self._levels(depth)
            parents = [*before.parents, *parents]
            passes.append(DevicePass(rows, plan, index, depth, levels, num_ranks, parents))
        return passes

    def constants(self, passes: Sequence[DevicePass]) -> list[Tensor]:
        """Return what the device reads to choose nodes, on the host, in the order of use."""
        parts = [(p.row_indices, p.plan.index, p.plan.own_bits) for p in passes[1:]]
        chooses = any(bits is not None for *_, bits in parts)
        ends = [self.ends] if chooses and self.ends is not None else []
        return [*ends, *(tensor for part in parts for tensor in part if tensor is not None)]

    def _levels(self, depth: int) -> int:
        tree, most = self.shape.tree, self.shape.levels_per_pass
        return most if tree is None else min(most, tree.height - depth)

    def _make(self, num_ranks: int, depth: int) -> list[PassPlan]:
        passes = list(_pass_picks(self.shape, num_ranks, depth))
        widths = [width for width, _ in passes]
        # Every node sees the root, which has no bit.
        own_bits = pack_bits(torch.eye(sum(widths[1:]), dtype=torch.bool)).split(widths[1:])
        chooses = any(picks is None for _, picks in passes)
        entries = num_ranks * self.shape.levels_per_pass
        plans = []
        for number, (width, picks) in enumerate(passes):
            all_entries = number == 0 or picks == list(range(widths[number - 1] * entries))
            index = None if picks is None or all_entries else torch.tensor(picks)
            seen = own_bits[number - 1] if chooses and number else None
            plans.append(PassPlan(width, picks, index, seen))
        return plans


def _pass_picks(
    shape: TreeShape, num_ranks: int, depth: int
) -> Iterator[tuple[int, list[int] | None]]:
    """Yield the width and the picks of every pass, see `PassPlan`."""
    yield 1, [0]
    if shape.tree is None:
        width = 1
        for _ in range(1, depth):
            children = width * num_ranks
            width = min(children, shape.expanded_per_level)
            yield width, list(range(children)) if width == children else None
        return
    levels = shape.levels_per_pass
    index_of: dict[Path, int] = {(): 0}
    for level in range(levels, depth, levels):
        nodes = [
            path
            for path in shape.tree.paths
            if len(path) == level
            and path in shape.tree.inner
            and path[:-levels] in index_of
            and max(path[-levels:]) < num_ranks
        ]
        if not nodes:
            return
        yield (
            len(nodes),
            [
                (index_of[path[:-levels]] * levels + step) * num_ranks + rank
                for path in nodes
                for step, rank in enumerate(path[-levels:])
            ],
        )
        index_of = {path: number for number, path in enumerate(nodes)}
