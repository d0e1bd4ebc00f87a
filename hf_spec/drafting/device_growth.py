"""Growth of drafts on the device, without synchronizing between passes.

If no length policy decides after each pass, all passes are queued, their tokens are fetched in one
transfer, and the drafts are rebuilt from them node by node. The host has to know the shape of what
it queues. So each pass runs the largest number of nodes per row that it can have; rows with fewer
are padded, and padding gets no children. The parents of the nodes follow from that shape, or the
device chooses the nodes and computes what each of them sees.

Since all shapes are known, a draft can also be one CUDA graph (see `LevelDrafter.step_graphs`): the
host prepares every pass before the first one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import fetch_packed, packed, send
from hf_spec.drafting.pass_plans import DevicePass, PassPlan, PassPlans
from hf_spec.drafting.tree_growth import Growth, NextLists, NextTokens, RowGrowth


class _Constants:
    """Tensors of `PassPlans.constants` on the device, in the order in which they are read."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = iter(tensors)

    def take(self, like: Tensor | None) -> Tensor | None:
        """Return the next tensor, or None if the host has none there."""
        return None if like is None else next(self._tensors)


class DeviceGrowth(Growth):
    """Growth that is fetched once, when all passes are queued.

    Args:
        drafts: the drafts; they change in `finish` only.
        plans: plans of their shape.
        passes: all passes, see `PassPlans.passes`; None finds them after the first one.
        constants: `plans.constants(passes)` on the device; None sends them.

    Attributes:
        prepared: what the drafter has prepared for the current pass.
        all_noise: `noise` of all passes of a chain, one after the other.
    """

    def __init__(
        self,
        drafts: Mapping[int, RowGrowth],
        plans: PassPlans,
        passes: Sequence[DevicePass] | None = None,
        constants: Sequence[Tensor] | None = None,
    ):
        self._drafts = drafts
        self._plans = plans
        first = DevicePass(list(drafts), PassPlan(1, [0]), None, 0, 1, 1, [-1])
        self._passes = [first] if passes is None else passes
        self._are_known = passes is not None
        self._constants = None if constants is None else _Constants(constants)
        self._ends: Tensor | None = None
        self.prepared: Any = None
        self.all_noise: Tensor | None = None
        # Per pass: tokens and chances, (A, width, levels, ranks), see `NextTokens`; the (A, w)
        # entries of the pass before that were chosen to run, if the device chose them; and the
        # (A * w, R) distributions that tokens were drawn from.
        self._queued: list[tuple[Tensor, Tensor]] = []
        self._chosen: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._number = 0
        # (A, width, ...) of the nodes: their tokens; the probability of reaching them, float64, 0
        # for padding; and the bits of `visible`.
        self._tokens: Tensor | None = None
        self._reach: Tensor | None = None
        self._bits: Tensor | None = None
        # How the nodes follow from the pass before: the indices of the rows in it, None for the
        # same; the entries that run now, None for all.
        self._row_indices: Tensor | None = None
        self._index: Tensor | None = None

    @property
    def rows(self) -> list[int]:  # type: ignore[override]
        """The rows that grow; none after the last pass."""
        return self._pass.rows if self._number < len(self._passes) else []

    @property
    def depth(self) -> int:  # type: ignore[override]
        """Depth of the nodes."""
        return self._pass.depth

    @property
    def pass_parents(self) -> list[int]:
        """See `DevicePass.parents`."""
        return self._pass.parents

    @property
    def tokens_on_device(self) -> bool:  # type: ignore[override]
        """True but for the roots."""
        return self._number > 0

    @property
    def tokens(self) -> Tensor:
        """See `Growth`."""
        if self._tokens is None:
            return torch.tensor([self._drafts[row].graph.tokens[0] for row in self.rows])
        return self._tokens.flatten()

    @property
    def visible(self) -> Tensor | None:  # type: ignore[override]
        """See `Growth`."""
        return None if self._bits is None else self._bits.flatten(0, 1)

    @property
    def visible_bytes(self) -> int | None:
        """Number of bytes per node of `visible`; None if it is None."""
        bits = self._pass.plan.own_bits
        return None if bits is None else bits.shape[1]

    @property
    def noise(self) -> Tensor | None:  # type: ignore[override]
        """See `Growth`."""
        if self.all_noise is None:
            return None
        counts = [len(p.rows) for p in self._passes]
        return self.all_noise.split(counts)[self._number]

    @property
    def parents(self) -> Tensor:
        """See `Growth`."""
        if self._tokens is None:
            return torch.arange(len(self.rows))
        before = self._passes[self._number - 1]
        rows, index, device = self._row_indices, self._index, self._plans.device
        entries = before.levels * before.num_ranks
        if rows is None:
            rows = torch.arange(len(self.rows), device=device)
        if index is None:
            index = torch.arange(self._pass.plan.width * before.levels, device=device)
        first = rows[:, None] * before.plan.width
        return (first + index[..., :: before.levels] // entries).flatten()

    def num_nodes(self, row: int) -> int:
        """See `Growth`."""
        return self._pass.plan.width

    def paths(self) -> list[list[int]]:
        """Raise `NotImplementedError`: the host does not know the tokens."""
        raise NotImplementedError("paths of drafts whose tokens are on the device")

    def node_depths(self) -> list[int]:
        """See `Growth`."""
        return [self.depth] * len(self.owners)

    def expanded_subtree(self, row: int) -> tuple[list[int], list[int]]:
        """See `Growth`."""
        return [self._drafts[row].graph.tokens[0]] * len(self.pass_parents), self.pass_parents

    def add(self, following: NextTokens) -> None:
        """See `Growth`."""
        _, levels, num_ranks = following.tokens.shape
        if not self._are_known:
            limits = {row: draft.max_levels for row, draft in self._drafts.items()}
            self._passes, self._are_known = self._plans.passes(limits, num_ranks), True
        shape = len(self.rows), self._pass.plan.width, levels, num_ranks
        self._queued.append((following.tokens.view(shape), following.chances.view(shape)))
        if following.probs is not None:
            self._probs.append(following.probs)

    def next_rows(self) -> list[int]:
        """See `Growth`."""
        after = self._number + 1
        return self._passes[after].rows if after < len(self._passes) else []

    def advance(self, rows: Sequence[int]) -> None:
        """See `Growth`; the device chooses the nodes."""
        self._number += 1
        if not rows:
            return
        if self._constants is None:
            host = self._plans.constants(self._passes)
            self._constants = _Constants(send(host, self._plans.device) if host else [])
        if self._number == 1 and self._pass.plan.own_bits is not None:
            self._ends = self._constants.take(self._plans.ends)
        tokens, chances = self._queued[-1]
        self._row_indices = indices = self._constants.take(self._pass.row_indices)
        if indices is not None:
            tokens, chances = tokens[indices], chances[indices]
            self._reach = None if self._reach is None else self._reach[indices]
            self._bits = None if self._bits is None else self._bits[indices]
        self._choose(self._pass.plan, tokens, chances)

    def skip(self) -> None:
        """Go on to the next pass on the host alone."""
        self._number += 1

    @property
    def outputs(self) -> list[Tensor]:
        """All results on the device: those to fetch as one vector, and the distributions."""
        tensors = [tensor for pair in self._queued for tensor in pair]
        return [packed([*tensors, *self._chosen]), *self._probs]

    def finish(self, outputs: Sequence[Tensor] | None = None) -> None:
        """Build the drafts from the `outputs`, fetched in one transfer.

        If given, they are those of another growth over the same passes.
        """
        vector, *probs = self.outputs if outputs is None else outputs
        lists = iter(fetch_packed(vector, self._kinds))
        results = [(next(lists), next(lists)) for _ in self._passes]
        for number, (done, (tokens, chances)) in enumerate(zip(self._passes, results, strict=True)):
            picked = next(lists) if done.chooses else None
            for index, row in enumerate(done.rows):
                draft = self._drafts[row]
                picks = done.plan.picks if picked is None else picked[index]
                # A whole tree expands all of its frontier, and the first pass the root.
                every = draft.shape.whole or not number
                ran = None if every else [draft.last_level[pick] for pick in picks or []]
                nodes = draft.begin_pass(ran)
                drawn_from = None
                if probs:
                    drawn_from = probs[number].view(len(done.rows), done.plan.width, -1)[index]
                draft.add_levels(nodes, NextLists(tokens[index], chances[index], drawn_from))

    @property
    def _kinds(self) -> list[tuple[Sequence[int], torch.dtype]]:
        """Shapes and dtypes of the tensors in the first of the `outputs`."""
        kinds: list[tuple[Sequence[int], torch.dtype]] = []
        for done in self._passes:
            shape = len(done.rows), done.plan.width, done.levels, done.num_ranks
            kinds += [(shape, torch.int64), (shape, torch.float32)]
        chosen = [p for p in self._passes if p.chooses]
        return [*kinds, *(((len(p.rows), p.plan.width), torch.int64) for p in chosen)]

    @property
    def _pass(self) -> DevicePass:
        return self._passes[self._number]

    def _choose(self, plan: PassPlan, tokens: Tensor, chances: Tensor) -> None:
        """Choose the nodes to run among (A, before, levels, ranks) entries."""
        num_rows, num_ranks = len(tokens), tokens.shape[-1]
        assert self._constants is not None, "sent before the second pass"
        index = self._constants.take(plan.index)
        index = None if index is None else index.expand(num_rows, -1)
        own_bits = self._constants.take(plan.own_bits)
        if own_bits is not None:
            reach = self._reached(tokens.flatten(1, 2), chances.flatten(1, 2))
            if plan.picks is None:
                # Ties go to the first, as on the host, and the nodes run in the same order.
                best = reach.sort(dim=1, descending=True, stable=True).indices[:, : plan.width]
                index = best.sort(dim=1).values
                self._chosen.append(index)
            self._reach = _picked(reach, index)
            own_bits = own_bits.expand(num_rows, -1, -1)
            self._bits = _with_parents_bits(self._bits, index, own_bits, num_ranks)
        self._tokens = _picked(tokens.flatten(1), index)
        self._index = index

    def _reached(self, tokens: Tensor, chances: Tensor) -> Tensor:
        """Return (A, before * ranks) float64, the probability of reaching each child."""
        shape, ends = self._plans.shape, self._ends
        # In the precision of the host, which prunes by the same rules.
        likely = chances.double()
        reach = likely if self._reach is None else likely * self._reach[..., None]
        rules = []
        if shape.min_probability > 0:
            rules.append(likely >= shape.min_probability)
        if shape.min_sibling_ratio > 0:
            rules.append(likely >= shape.min_sibling_ratio * likely[..., :1])
        if ends is not None:
            rules.append((tokens[..., None] != ends).all(dim=-1))
        for rule in rules:
            reach = reach.where(rule, 0.0)
        return reach.flatten(1)


def _picked(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.gather(1, index)


def _with_parents_bits(
    bits: Tensor | None, index: Tensor | None, own_bits: Tensor, num_ranks: int
) -> Tensor:
    if bits is None:
        return own_bits
    if index is None:
        return bits.repeat_interleave(num_ranks, dim=1) | own_bits
    above = (index // num_ranks)[..., None].expand(-1, -1, bits.shape[-1])
    return bits.gather(1, above) | own_bits
