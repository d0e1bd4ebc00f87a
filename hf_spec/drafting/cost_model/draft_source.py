"""A drafter under the cost model with its acceptance rates, and the merged tree of several drafts.

The *reach* of a draft node is the probability that the target's path runs through it: the product
of the acceptance rates along the path, where the rate of a node is the share of nodes of its kind
that were accepted after an accepted parent. The kind is the draft probability in tenths or, for
drafters without probabilities, the kind of the draft, depth, and rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_spec.drafting.cost_model.acceptance_stats import (
    ONE_PRIOR,
    AcceptanceStats,
    DraftMemory,
    NodePriors,
    probability_bin,
)
from hf_spec.drafting.cost_model.exploration import REST_PER_STEP, Exploration
from hf_spec.drafting.length_policy import LengthPolicy, MeasuredPolicy
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput

# Share of the weight of level trials that remains after a round in which the drafter did not run:
# the rate stays as it is, but the next trials change it faster.
RETENTION = 0.95
# After more new tokens of a row than this, a drafter first reads the text, at a cost of its own.
# Fewer tokens are part of the draft.
MAX_UNREAD = 8
# Nodes with a lower reach are ignored.
MIN_REACH = 0.01
# Kinds of nodes without probabilities: depths and ranks up to these.
DEPTH_KINDS, RANK_KINDS = 3, 2
# Nodes that the target is expected to verify per level of a draft tree.
NODES_PER_LEVEL = 4


@dataclass(eq=False)
class DraftSource:
    """A drafter with its last draft and its acceptance rates.

    Attributes:
        name: key in counters and timings.
        depth: most levels of a draft.
        prior: kind of draft -> acceptance rates before any trial, see `NODE_PRIOR`.
        nodes_per_level: expected number of verified nodes per level.
        tree, limits: the last draft, and the requested depth of each row; levels that a length
            policy did not draft are not part of it.
        explorations: per row, when to draft although it is not expected to pay.
        read: per row the length of its text at its last draft.
        sizes: per row the nodes of its last draft, root excluded.
    """

    name: str
    drafter: Drafter
    depth: int
    prior: NodePriors = field(default_factory=lambda: ONE_PRIOR)
    nodes_per_level: int = NODES_PER_LEVEL

    def __post_init__(self) -> None:
        self.depth = min(self.depth, self.drafter.max_depth)
        self.tree: DraftTree
        self.limits: Mapping[int, int] = {}
        self.sizes: dict[int, int] = {}

    def start(self, num_rows: int, memory: DraftMemory | None = None) -> None:
        """Reset the stats of all rows to `memory`; the drafter itself is reset by `active`."""
        self._memory = memory.stats if memory else None
        self.explorations = memory.explorations if memory else {}
        self._stats = [AcceptanceStats.from_prior(self.prior)] * num_rows
        self.read: dict[int, int] = {}
        for row in range(num_rows):
            self._restart(row)

    def restart(self, row: int) -> None:
        """Reset the stats and the drafter for a new sequence in `row`."""
        self._restart(row)
        self.drafter.restart(row)

    def _restart(self, row: int) -> None:
        memory = self._memory
        prior = AcceptanceStats.from_prior(self.prior)
        self._stats[row] = prior if memory is None else memory.as_prior()
        self.sizes.pop(row, None)
        self.read.pop(row, None)
        self.explorations.setdefault(row, Exploration()).restart()

    @property
    def policy(self) -> LengthPolicy | None:
        """The length policy of a drafter that grows level by level."""
        return getattr(self.drafter, "policy", None)

    @property
    def trial_depth(self) -> int:
        """Levels of the cheapest draft."""
        # Passes never decrease with depth, which may be unlimited.
        forwards = self.drafter.num_forwards
        return bisect_right(range(1, self.depth + 1), forwards(1), key=forwards)

    def with_trials(
        self,
        depths: Mapping[int, int],
        max_depths: Mapping[int, int],
        cost: float,
        steps_left: float,
    ) -> dict[int, int]:
        """Return the depths, and those of trials in rows where the drafter was not chosen.

        A trial costs `cost` steps of the target, of which at most `steps_left` are to come.
        Forward passes are shared, so all these rows are tried as soon as one is due.
        """
        open_rows = [row for row, most in max_depths.items() if most]
        idle = [row for row in open_rows if not depths[row]]
        due = [self.explorations[row].is_due(cost) for row in idle]
        tried = any(due) and REST_PER_STEP * cost <= steps_left
        for row in open_rows:
            self.explorations[row].record(depths[row] > 0, tried and not depths[row])
        trial = dict.fromkeys(idle, self.trial_depth) if tried else {}
        return {row: min(most, trial.get(row, depths[row])) for row, most in max_depths.items()}

    def unread(self, state: GenerationState, rows: Iterable[int]) -> int:
        """Return how many tokens the drafter must read in those `rows` that lag `MAX_UNREAD`."""
        lags = (len(state.tokens[row]) - self.read.get(row, 0) for row in rows)
        return sum(lag for lag in lags if lag > MAX_UNREAD)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> None:
        """Run the drafter; rows with limit 0 are included, so that it follows their text."""
        self.limits = {row: min(limit, self.depth) for row, limit in limits.items()}
        self.tree = self.drafter.draft(state, self.limits)
        for row, limit in self.limits.items():
            if limit:
                self.sizes[row] = len(self.tree.nodes(row)) - 1
                self.read[row] = len(state.tokens[row])
        if self.policy is not None:
            self.limits = {row: self.tree.height(row) for row in self.limits}

    def skip(self) -> None:
        """Do not run the drafter in this round; its last draft is not judged again."""
        self.limits = {}

    def level_rate(self, row: int, depth: int) -> float:
        """Return the acceptance rate of level `depth` after level `depth` - 1."""
        return self._stats[row].levels.rate(depth)

    def chain_rate(self, row: int, depth: int) -> float:
        """Return the same if only the most probable node of the level is sent."""
        return self._stats[row].first.rate(depth)

    def reach(self, row: int) -> list[float]:
        """Return the reach of each node of the last draft of `row`; 0 below `MIN_REACH`."""
        tree, rates = self.tree, self._stats[row].nodes
        start = tree.row_start[row]
        reach = [1.0]
        for node in tree.nodes(row)[1:]:
            above = reach[tree.parent[node] - start]
            reach.append(above * rates.rate(self._kind(row, node)) if above >= MIN_REACH else 0.0)
        return reach

    def merge_into(self, trees: Mapping[int, MergedTree]) -> None:
        """Add the last draft to the merged tree of every row."""
        for row, tree in trees.items():
            tree.add_draft(self, row)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Update the acceptance rates and pass the verdict on to the drafter.

        One that reads hidden states gets the verdict on the merged tree, whose nodes were run; any
        other one on its own draft.
        """
        accepted: list[list[int]] = [[] for _ in verdict.accepted]
        for row, limit in self.limits.items():
            tokens = verdict.tokens(row)
            path = self._count_trials(row, tokens, limit)
            accepted[row] = path[: len(verdict.accepted[row])]
            if isinstance(self.policy, MeasuredPolicy):
                self.policy.learn(row, limit, len(path), len(tokens))
        own_verdict = Verdict(self.tree, accepted, verdict.bonus)
        self.drafter.observe(verdict if self.drafter.hidden_layers else own_verdict, output)

    def _count_trials(self, row: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Count which nodes and levels match `tokens`; return the matching path of the draft."""
        tree, path = self.tree, [self.tree.row_start[row]]
        if not limit:
            self._stats[row].levels.fade(RETENTION)
            self._stats[row].first.fade(RETENTION)
            return []
        all_stats = [stats for stats in (self._stats[row], self._memory) if stats is not None]
        for depth, token in enumerate(tokens[:limit], start=1):
            child, proposals = tree.child(path[-1], token), tree.proposals(path[-1])
            for stats in all_stats:
                for node in proposals:
                    stats.nodes.count(self._kind(row, node), tree.tokens[node] == token)
                stats.levels.count(depth, child is not None)
                # Siblings are in order of probability.
                stats.first.count(depth, child is not None and child == proposals[0])
            if child is None:
                break
            path.append(child)
        return path[1:]

    def _kind(self, row: int, node: int) -> Hashable:
        tree = self.tree
        if tree.node_probs is not None:
            return probability_bin(tree.node_probs[node])
        rank = tree.children[tree.parent[node]].index(node)
        depth = min(tree.depth[node], DEPTH_KINDS)
        return self.drafter.draft_kind(row), depth, min(rank, RANK_KINDS - 1)


class MergedTree(TokenGraph):
    """The drafts of several drafters for one row; `best_reach` is the highest of a node in any."""

    def __init__(self, root: int):
        super().__init__([root])
        self.best_reach = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def add_draft(self, source: DraftSource, row: int) -> None:
        """Add the nodes of the last draft of `source` for `row` that have `MIN_REACH`."""
        tree = source.tree
        start = tree.row_start[row]
        merged = {start: 0}
        for node, reach in zip(tree.nodes(row)[1:], source.reach(row)[1:], strict=True):
            if reach < MIN_REACH:
                continue
            parent, token = merged[tree.parent[node]], tree.tokens[node]
            index = self._children.setdefault((parent, token), len(self.tokens))
            if index == len(self.tokens):
                self.add_node(parent, token)
                self.best_reach.append(0.0)
            # For every drafter that has both, a node's reach is at most its parent's.
            self.best_reach[index] = max(self.best_reach[index], reach)
            merged[node] = index

    def reach_by_depth(self) -> list[float]:
        """Return, per depth from 1, the probability that the target's path reaches the depth."""
        reach_by_depth = [0.0] * max(self.depth)
        for depth, reach in zip(self.depth[1:], self.best_reach[1:], strict=True):
            reach_by_depth[depth - 1] = min(1.0, reach_by_depth[depth - 1] + reach)
        return reach_by_depth

    def subtree(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the root and `nodes`, which include all their parents."""
        chosen = [0, *sorted(nodes)]
        new_index = {node: index for index, node in enumerate(chosen)}
        parents = [new_index.get(self.parents[node], -1) for node in chosen]
        return [self.tokens[node] for node in chosen], parents
