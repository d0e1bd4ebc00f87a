"""Which drafters to ask, how deep, and which nodes to send: the most tokens per second.

A round brings one token per row and those drafted ones that the target accepts; it costs a forward
of the target over all nodes, and the drafts. Nodes are taken in order of value as long as tokens
per second rise, which for a given number of nodes is the best choice and always a tree. Whom to ask
is decided before, from how its levels fared: a level is worth what nobody else is expected to say.
Drafting nothing is the case of no nodes and nobody asked. A round that may not be made
(`RoundFilter`, see `hf_spec.drafting.cost_model.loss_budget`) is none of the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hf_spec.drafting.cost_model.acceptance_stats import DraftSource, MergedTree
from hf_spec.drafting.cost_model.cost_curves import Costs

# Whether a round may be made that is expected to gain so many tokens, all rows together, and to
# take so many seconds. A step without drafts always may.
RoundFilter = Callable[[float, float], bool]


def always(tokens: float, seconds: float) -> bool:
    """Any round."""
    return True


def never(tokens: float, seconds: float) -> bool:
    """No round with a draft."""
    return False


@dataclass(frozen=True)
class Round:
    """What a round is expected to bring and to cost, with `asked`: source -> row -> depth."""

    costs: Costs
    tokens: float
    nodes: float
    draft_seconds: float = 0.0
    asked: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return _rate(self.tokens, self.seconds)

    @property
    def seconds(self) -> float:
        """What it takes."""
        return self.costs.verify(self.nodes) + self.draft_seconds

    def level_price(self, source: DraftSource, asked: int, rows: int, level: int) -> float:
        """What another level of one row's draft costs, in tokens that its time brings elsewhere.

        So many of the rows are `asked`. A chain sends the level, too. Of a tree, the nodes to send
        are chosen when it is there.
        """
        draft, verify = self.costs.draft[source.name], self.costs.verify
        seconds = (draft(level + 1) - draft(level)) / asked
        if source.nodes_per_level == 1:
            nodes = rows + level * asked
            seconds += verify(nodes + 1) - verify(nodes)
        return self.rate * seconds


def _rate(tokens: float, seconds: float) -> float:
    # Timings may be given, and 0 among them.
    return tokens / max(seconds, 1e-9)


def _falling(entry: tuple[float, int, int]) -> float:
    return -entry[0]


def choose_nodes(
    costs: Costs,
    trees: Mapping[int, MergedTree],
    max_nodes: int,
    draft_seconds: float = 0.0,
    allows: RoundFilter = always,
) -> tuple[Round, dict[int, list[int]]]:
    """The nodes of each row's tree, at most `max_nodes`, that make the fastest round."""
    ranked: list[tuple[float, int, int]] = []
    for row, tree in trees.items():
        nodes = [(value, row, node) for node, value in enumerate(tree.values)][1:]
        # Parents come before their children, and sorting keeps the order of equals.
        ranked += sorted(nodes, key=_falling)[:max_nodes]
    ranked.sort(key=_falling)
    totals = list(accumulate((value for value, _, _ in ranked), initial=float(len(trees))))
    sizes = _sizes(costs, trees, ranked)
    seconds = [costs.verify(size) + draft_seconds for size in sizes]
    rates = list(map(_rate, totals, seconds))
    allowed = [0, *(n for n in range(1, len(rates)) if allows(totals[n], seconds[n]))]
    count = max(allowed, key=rates.__getitem__)
    best = Round(costs, totals[count], sizes[count], draft_seconds)
    chosen: dict[int, list[int]] = {row: [] for row in trees}
    for _, row, node in ranked[:count]:
        chosen[row].append(node)
    return best, chosen


def _sizes(
    costs: Costs, trees: Mapping[int, MergedTree], ranked: Sequence[tuple[float, int, int]]
) -> Sequence[float]:
    """Nodes of a forward over the roots and so many of the others, with what branches add."""
    if not costs.branch:
        return range(len(trees), len(trees) + len(ranked) + 1)
    extended: set[tuple[int, int]] = set()
    sizes = [float(len(trees))]
    for _, row, node in ranked:
        above = row, trees[row].parents[node]
        again = trees[row].depth[node] if above in extended else 0
        extended.add(above)
        sizes.append(sizes[-1] + 1 + costs.branch * again)
    return sizes


def choose_sources(
    base: Round,
    trees: Mapping[int, MergedTree],
    sources: Sequence[DraftSource],
    room: Mapping[int, int],
    allows: RoundFilter = always,
) -> Round:
    """The best round that is expected, which says whom to ask on top of what is proposed already.

    `base` is the best one without asking anybody, `room` the deepest draft of each row.
    """
    reach_by_depth = {
        row: dict(enumerate(tree.reach_by_depth(), start=1)) for row, tree in trees.items()
    }
    best = base
    while True:
        left = [
            source
            for source in sources
            if not source.drafter.exclusive_tree and source.name not in best.asked
        ]
        options = [_asking(best, source, reach_by_depth, room, allows) for source in left]
        better = max(options, key=lambda option: option.rate, default=best)
        if better.rate <= best.rate:
            break
        new = next(source for source in left if source.name in better.asked)
        for row, depth in better.asked[new.name].items():
            for level, gain in enumerate(_gains(new, row, reach_by_depth[row], depth), start=1):
                reach_by_depth[row][level] = reach_by_depth[row].get(level, 0.0) + gain
        best = better
    alone = [
        _alone(base, source, trees, room) for source in sources if source.drafter.exclusive_tree
    ]
    allowed = [option for option in alone if allows(option.tokens, option.seconds)]
    return max([best, *allowed], key=lambda option: option.rate)


def _asking(
    base: Round,
    source: DraftSource,
    reach_by_depth: Mapping[int, Mapping[int, float]],
    room: Mapping[int, int],
    allows: RoundFilter,
) -> Round:
    """The best round in which `source` is asked too; `base` itself if there is no room."""
    # Levels that are not worth their nodes, at the rate there is already, are not asked for.
    step = base.costs.verify(base.nodes + source.nodes_per_level) - base.costs.verify(base.nodes)
    gains = {}
    for row, mass in reach_by_depth.items():
        levels = _gains(source, row, mass, min(room[row], source.depth))
        worthy = [level for level, gain in enumerate(levels, 1) if gain > base.rate * step]
        gains[row] = levels[: max(worthy, default=0)]
    best, tokens, nodes = base, base.tokens, base.nodes
    for depth in range(1, max(map(len, gains.values()), default=0) + 1):
        level = [levels[depth - 1] for levels in gains.values() if len(levels) >= depth]
        tokens += sum(level)
        nodes += source.nodes_per_level * len(level)
        limits = {row: min(depth, len(levels)) for row, levels in gains.items()}
        seconds = base.draft_seconds + base.costs.draft[source.name](depth)
        asked = {**base.asked, source.name: limits}
        option = Round(base.costs, tokens, nodes, seconds, asked)
        if option.rate > best.rate and allows(option.tokens, option.seconds):
            best = option
    return best


def _alone(
    base: Round, source: DraftSource, trees: Mapping[int, MergedTree], room: Mapping[int, int]
) -> Round:
    """The round in which the tree of `source` is all that is sent."""
    limits = {row: min(room[row], source.depth) for row in trees}
    tokens = sum(1 + sum(_gains(source, row, {}, depth)) for row, depth in limits.items())
    width = source.nodes_per_level
    nodes = sum(1 + source.size(row, width * depth) for row, depth in limits.items())
    return Round(base.costs, tokens, nodes, asked={source.name: limits})


def _gains(source: DraftSource, row: int, mass: Mapping[int, float], depth: int) -> list[float]:
    """Per level the expected tokens of `source` that the others, at `mass`, do not bring."""
    reach, gains = 1.0, []
    for level in range(1, depth + 1):
        reach *= source.level(row, level)
        gains.append(reach * (1.0 - mass.get(level, 0.0)))
    return gains
