"""The decision rule: the round with the most expected accepted tokens per second.

A round yields one token per row plus the drafted tokens that the target accepts. It costs the
target's forward pass over all nodes, and the drafts. A round without a draft is always an option.

- `choose_nodes`: nodes are added in order of reach as long as the rate increases. For a given
  number of nodes this is optimal, and the result is always a tree.
- `choose_sources`: drafters are chosen before they run, by the acceptance rates of their levels. A
  level counts only the tokens that no other draft is expected to contribute. A drafter of trees is
  chosen if a tree or the chain of its most probable nodes pays. A drafter that must first read
  text, such as the prompt, is chosen if that time is saved before the generation ends. Beside
  drafters without a model, it waits until they have missed enough: only the text shows how much of
  it they can copy. As in the ski rental problem, the wait costs at most a share of the reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hf_spec.drafting.cost_model.cost_curves import Costs
from hf_spec.drafting.cost_model.draft_source import DraftSource, MergedTree
from hf_spec.drafting.length_policy import LevelCost

# The expected saving must be this many times the time of reading: expected rates may be wrong, and
# the generation may end early.
SAVING_FACTOR = 1.5
# Beside drafters without a model, a drafter reads text after missing this share of the time that it
# takes. More delays drafts of texts that copy nothing, less reads texts that are copied
# (examples/studies/length_policies).
MISSED_SHARE = 0.35
# A round with a draft must promise this many times the rate of one without: rates and costs are
# estimates, and the best of many choices seems better than it is.
MIN_GAIN = 1.05
# The same if the cost of a round without a draft is not up to date. A round without a draft is run
# then, and timed.
STALE_GAIN = 1.5


@dataclass(frozen=True)
class Horizon:
    """Remaining length of a generation, over which one-time costs must pay off.

    Attributes:
        tokens: most tokens that the rows may still gain together.
        reading_seconds: drafter -> time to read the text since its last draft.
        missed_seconds: drafter -> time that its drafts would have saved since its last draft; None
            if it need not wait. `repays` adds the time of a round.
    """

    tokens: float = 0.0
    reading_seconds: Mapping[str, float] = field(default_factory=dict)
    missed_seconds: dict[str, float] | None = None

    def repays(self, name: str, before: PlannedRound, after: PlannedRound) -> bool:
        """Return True if `after` instead of `before` is worth the reading, now and not later."""
        reading = self.reading_seconds.get(name, 0.0)
        saved_per_token = 1.0 / before.rate - 1.0 / after.rate
        if self.tokens * saved_per_token < SAVING_FACTOR * reading:
            return False
        if self.missed_seconds is None:
            return True
        missed = self.missed_seconds.get(name, 0.0) + before.tokens * saved_per_token
        self.missed_seconds[name] = missed
        return missed >= MISSED_SHARE * reading


@dataclass(frozen=True)
class PlannedRound:
    """A round with its expected tokens and costs, over all rows.

    `nodes` include the roots; `depths` map a drafter's name to the depth of its draft by row.
    """

    costs: Costs
    tokens: float
    nodes: float
    draft_seconds: float = 0.0
    depths: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return _rate(self.tokens, self.seconds)

    @property
    def seconds(self) -> float:
        """Expected duration."""
        return self.costs.verify(self.nodes) + self.draft_seconds

    def level_cost(
        self, source: DraftSource, drafting_rows: int, rows: int, level: int
    ) -> LevelCost:
        """Return the cost of a level after `level`, in tokens at the current rate.

        A level is of use only if at least one of its nodes is verified.
        """
        draft, verify = self.costs.draft[source.name], self.costs.verify
        nodes = rows + level * drafting_rows
        return LevelCost(
            shared=self.rate * (draft(level + 1) - draft(level)),
            per_row=self.rate * (verify(nodes + 1) - verify(nodes)),
        )


@dataclass(frozen=True)
class NodeLimits:
    """Limits of what a round sends.

    Attributes:
        row_nodes: most nodes of a row, root excluded.
        size: most nodes of all rows, roots included.
        min_gain: least rate of a round with drafts, as a multiple of that of one without.
    """

    row_nodes: int
    size: float = math.inf
    min_gain: float = MIN_GAIN


def _rate(tokens: float, seconds: float) -> float:
    # Configured timings may be 0.
    return tokens / max(seconds, 1e-9)


def _by_reach(entry: tuple[float, int, int]) -> float:
    return -entry[0]


def choose_nodes(
    costs: Costs,
    trees: Mapping[int, MergedTree],
    limits: NodeLimits,
    draft_seconds: float = 0.0,
    host_seconds: float = 0.0,
) -> tuple[PlannedRound, dict[int, list[int]]]:
    """Return the fastest round over the drafts of all rows, and its nodes per row.

    Only rounds with drafts cost `host_seconds`: they have been spent, but are saved by later rounds
    if drafts do not pay.
    """
    ranked: list[tuple[float, int, int]] = []
    for row, tree in trees.items():
        nodes = [(reach, row, node) for node, reach in enumerate(tree.best_reach)][1:]
        # Parents precede their children, and sorting is stable.
        ranked += sorted(nodes, key=_by_reach)[: limits.row_nodes]
    ranked.sort(key=_by_reach)
    totals = list(accumulate((reach for reach, _, _ in ranked), initial=float(len(trees))))
    # The roots are always run.
    known = _forward_sizes(costs, trees, ranked)
    sizes = [size for size in known if size <= limits.size] or [float(len(trees))]
    seconds = [costs.verify(size) + draft_seconds for size in sizes]
    seconds[1:] = [time + host_seconds for time in seconds[1:]]
    rates = list(map(_rate, totals[: len(seconds)], seconds))
    count = max(range(len(rates)), key=rates.__getitem__)
    count = count if rates[count] >= limits.min_gain * rates[0] else 0
    best = PlannedRound(costs, totals[count], sizes[count], draft_seconds)
    chosen: dict[int, list[int]] = {row: [] for row in trees}
    for _, row, node in ranked[:count]:
        chosen[row].append(node)
    return best, chosen


def _forward_sizes(
    costs: Costs, trees: Mapping[int, MergedTree], ranked: Sequence[tuple[float, int, int]]
) -> Sequence[float]:
    """Return the sizes of forward passes over the roots and the first 0, 1, 2, ... ranked nodes."""
    if not costs.branch:
        return range(len(trees), len(trees) + len(ranked) + 1)
    extended: set[tuple[int, int]] = set()
    sizes = [float(len(trees))]
    for _, row, node in ranked:
        above = row, trees[row].parents[node]
        repeated = trees[row].depth[node] if above in extended else 0
        extended.add(above)
        sizes.append(sizes[-1] + 1 + costs.branch * repeated)
    return sizes


def choose_sources(
    base: PlannedRound,
    trees: Mapping[int, MergedTree],
    sources: Sequence[DraftSource],
    max_depths: Mapping[int, int],
    horizon: Horizon,
) -> PlannedRound:
    """Return the fastest expected round, whose `depths` name the drafters to run.

    `base` is the best round over the existing drafts, `trees`, without running any of `sources`;
    `max_depths` bounds the drafts per row.
    """
    if not sources:
        return base
    reach_by_depth = {
        row: dict(enumerate(tree.reach_by_depth(), start=1)) for row, tree in trees.items()
    }
    mergeable = [source for source in sources if not source.drafter.exclusive_tree]
    exclusive = [source for source in sources if source.drafter.exclusive_tree]
    best = base
    while True:
        unused = [source for source in mergeable if source.name not in best.depths]
        options = [_with_source(best, s, reach_by_depth, max_depths, horizon) for s in unused]
        better = max(options, key=lambda option: option.rate, default=best)
        if better.rate <= best.rate:
            break
        new = next(source for source in unused if source.name in better.depths)
        for row, depth in better.depths[new.name].items():
            levels = _level_gains(new.level_rate, row, reach_by_depth[row], depth)
            for level, gain in enumerate(levels, 1):
                reach_by_depth[row][level] = reach_by_depth[row].get(level, 0.0) + gain
        best = better
    whole = [_with_exclusive_tree(base, source, trees, max_depths) for source in exclusive]
    return max([best, *whole], key=lambda option: option.rate)


def _with_source(
    base: PlannedRound,
    source: DraftSource,
    reach_by_depth: Mapping[int, Mapping[int, float]],
    max_depths: Mapping[int, int],
    horizon: Horizon,
) -> PlannedRound:
    """Return the best round that also runs `source`; `base` if none is better."""
    # Nodes per level -> acceptance rates: those of a chain, and those of a tree.
    rates = {1: source.chain_rate, source.nodes_per_level: source.level_rate}
    best = base
    for width, level_rate in rates.items():
        gains = {
            row: _level_gains(level_rate, row, reach, min(max_depths[row], source.depth))
            for row, reach in reach_by_depth.items()
        }
        option = _with_levels(base, source, gains, width)
        best = max(best, option, key=lambda planned: planned.rate)
    return best if horizon.repays(source.name, base, best) else base


def _with_levels(
    base: PlannedRound, source: DraftSource, gains: Mapping[int, Sequence[float]], width: int
) -> PlannedRound:
    """Return the best round with `width` nodes per level of `source`, whose gains are given."""
    # Levels whose gain does not cover their nodes at the current rate are not drafted.
    step = base.costs.verify(base.nodes + width) - base.costs.verify(base.nodes)
    useful = {}
    for row, levels in gains.items():
        paying = [level for level, gain in enumerate(levels, 1) if gain > base.rate * step]
        useful[row] = levels[: max(paying, default=0)]
    best, tokens, nodes = base, base.tokens, base.nodes
    for depth in range(1, max(map(len, useful.values()), default=0) + 1):
        level = [levels[depth - 1] for levels in useful.values() if len(levels) >= depth]
        tokens += sum(level)
        nodes += width * len(level)
        row_depths = {row: min(depth, len(levels)) for row, levels in useful.items()}
        seconds = base.draft_seconds + base.costs.draft[source.name](depth)
        depths = {**base.depths, source.name: row_depths}
        option = PlannedRound(base.costs, tokens, nodes, seconds, depths)
        if option.rate > best.rate:
            best = option
    return best


def _with_exclusive_tree(
    base: PlannedRound,
    source: DraftSource,
    trees: Mapping[int, MergedTree],
    max_depths: Mapping[int, int],
) -> PlannedRound:
    depths = {row: min(max_depths[row], source.depth) for row in trees}
    tokens = sum(
        1 + sum(_level_gains(source.level_rate, row, {}, depth)) for row, depth in depths.items()
    )
    width = source.nodes_per_level
    nodes = sum(1 + source.sizes.get(row, width * depth) for row, depth in depths.items())
    return PlannedRound(base.costs, tokens, nodes, depths={source.name: depths})


def _level_gains(
    level_rate: Callable[[int, int], float],
    row: int,
    reach_by_depth: Mapping[int, float],
    depth: int,
) -> list[float]:
    """Return, per level, the expected tokens that a drafter adds to the other drafts.

    `level_rate` returns the acceptance rate of a level of the row after the level above.
    """
    reach, gains = 1.0, []
    for level in range(1, depth + 1):
        reach *= level_rate(row, level)
        gains.append(reach * (1.0 - reach_by_depth.get(level, 0.0)))
    return gains
