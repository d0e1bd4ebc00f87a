"""Drafter whose draft length and width follow from the cost model (`hf_spec.drafting.cost_model`).

Decisions depend on timings and on the text so far, never on a later random draw, so every verifier
stays exact. Timings vary between runs, and with them the statistics.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low

from transformers import PreTrainedModel

from hf_spec.backend.device.clock import clock_of
from hf_spec.drafting.cost_model.cost_curves import NUM_TIMINGS, Costs, RoundTimes, cached_times
from hf_spec.drafting.cost_model.draft_source import DraftSource, MergedTree
from hf_spec.drafting.cost_model.exploration import Backoff
from hf_spec.drafting.cost_model.round_timer import RoundTimer
from hf_spec.drafting.cost_model.selection import (
    MIN_GAIN,
    STALE_GAIN,
    Horizon,
    NodeLimits,
    PlannedRound,
    choose_nodes,
    choose_sources,
)
from hf_spec.drafting.length_policy import MeasuredPolicy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.kernel_layout import round_up
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.models.recurrent_layers import recurrent_share
from hf_spec.engine.runner import ModelRunner

# A length policy may draft this many times the depth that the acceptance rates of levels suggest.
DEPTH_FACTOR = 3
# Timed steps without a draft at the start of a generation, if their cost is not known; and most
# steps that are run for them, of which some may be captured as a CUDA graph and are not timed.
PLAIN_STEPS, MOST_PLAIN_STEPS = 2, 8


@dataclass(frozen=True)
class Bounds:
    """Depth of the deepest draft, and most verified nodes of a row, root excluded."""

    max_draft_tokens: int
    max_nodes: int


class CostModelDrafter(Drafter):
    """Runs the drafters that pay, merges their drafts, and sends the nodes that pay.

    Round costs and acceptance rates are measured and cached on the target, keyed by `key` and the
    set of drafters, unless `costs` are configured. Until the cost of a step without a draft is
    known, nothing is drafted. Drafters that are not expected to pay are tried again, see
    `hf_spec.drafting.cost_model.exploration`.

    Attributes:
        free: drafters without a model, which run in every round unless nothing of theirs is sent
            for long.
        assistants: other drafters, with distinct names.
        counters: "rounds", one per row and draft; "idle_rounds", those without draft nodes;
            "asked_NAME", those in which the assistant of that name ran.
    """

    assisted_refusal_reason = (
        "this drafter measures round times in the engine of hf_spec, which transformers' assisted "
        "decoding does not use; give a length_policy, or numbers of tokens (for trees also "
        "max_nodes), which are then fixed"
    )

    def __init__(
        self,
        free: Sequence[DraftSource],
        assistants: Sequence[DraftSource],
        target: PreTrainedModel,
        key: Hashable,
        bounds: Bounds,
        costs: Costs | None = None,
    ):
        self.free = free
        self.assistants = assistants
        self.max_depth = bounds.max_draft_tokens
        self.max_nodes = bounds.max_nodes
        self._target = target
        self._key = key
        self._configured_costs = costs
        self._sources = [*free, *assistants]
        self._counts: Counter[str] = Counter()
        layers = {layer for source in self._sources for layer in source.drafter.hidden_layers}
        self.hidden_layers = tuple(sorted(layers))

    @property
    def counters(self) -> Mapping[str, int]:  # type: ignore[override]
        """See the class."""
        return self._counts

    @property
    def forwards(self) -> int:
        """Forward passes of all drafters."""
        return sum(source.drafter.forwards for source in self._sources)

    def start(self, state: GenerationState) -> None:
        """Load the cached costs and acceptance rates."""
        self._counts = Counter()
        self._times: RoundTimes | None = None
        costs = self._configured_costs
        if costs is None:
            # Drafters that run in the target's forward pass (SDSAT) have no timing of their own.
            timed = [s for s in self.assistants if not s.drafter.exclusive_tree]
            drafters = tuple((s.name, s.drafter.timing_key) for s in timed)
            key = drafters, len(self.assistants), len(self.free), self._key
            self._times = cached_times(self._target, key, state.num_rows)
            forwards = {s.name: s.drafter.num_forwards for s in self.assistants}
            expected = {s.name: s.drafter.relative_cost(self._target) for s in self.assistants}
            known = {name: cost for name, cost in expected.items() if cost is not None}
            costs = self._times.costs(forwards, known)
        branch = recurrent_share(self._target.config.get_text_config())
        self._costs = replace(costs, branch=branch)
        times = self._times
        for index, source in enumerate(self._sources):
            memory = None if times is None else times.memory(index, source.prior)
            source.start(state.num_rows, memory)
        self._plain_steps = self._rounds = 0
        self._missed_seconds: dict[str, float] = {}
        self._backoff = Backoff.after(0 if times is None else times.idle_drafts)
        self._round_start, self._round_seconds = -math.inf, 0.0
        self._free_seconds: float | None = None
        self._host_seconds: deque[float] = deque(maxlen=NUM_TIMINGS)
        self._timer = RoundTimer(clock_of(state.device), self._costs, self._times)

    def restart(self, row: int) -> None:
        """Reset every drafter for a new sequence in `row`; the next round is not timed."""
        for source in self._sources:
            source.restart(row)
        self._timer.restart()

    def visit_runner(self, visit: Callable[[ModelRunner], object]) -> None:
        """Pass on the runner of every drafter that has a model."""
        for source in self._sources:
            source.drafter.visit_runner(visit)

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Activate every drafter."""
        with super().active(state), ExitStack() as stack:
            for source in self._sources:
                stack.enter_context(source.drafter.active(state))
            yield

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return the best nodes of all drafts, or one draft that cannot be merged or cut."""
        start = time.perf_counter()
        self._round_seconds, self._round_start = start - self._round_start, start
        self._timer.begin()
        measures_plain = self._measures_plain_steps(len(limits))
        max_depths = {
            row: 0 if measures_plain else min(limit, self.max_depth)
            for row, limit in limits.items()
        }
        trees = {row: MergedTree(state.tokens[row][-1]) for row in max_depths}
        drafted = self._draft_free(state, max_depths, trees)
        if not drafted and not self.assistants:
            self._free_seconds = None
            roots = {row: tree.subtree(()) for row, tree in trees.items()}
            return self._send(DraftTree.from_drafts(roots, state.num_rows), trees, len(trees))
        host = median_low(self._host_seconds) if self._host_seconds else 0.0
        largest = math.inf if self._times is None else self._times.verify.largest_trial
        node_limits = NodeLimits(self.max_nodes, largest, self._min_gain(len(trees)))
        choose = partial(choose_nodes, self._costs, trees, node_limits, host_seconds=host)
        best, nodes = choose()
        whole, assistant_seconds = None, 0.0
        if self.assistants:
            before = time.perf_counter()
            whole, expected = self._draft_assistants(state, max_depths, trees, best, limits)
            assistant_seconds = time.perf_counter() - before
            # Drafts that took longer than expected do not change the number of nodes to send.
            best, nodes = choose(draft_seconds=expected or self._timer.draft_seconds())
        if whole is None:
            drafts = {row: tree.subtree(nodes[row]) for row, tree in trees.items()}
            whole, size = DraftTree.from_drafts(drafts, state.num_rows), best.nodes
        else:
            size = whole.num_nodes
        self._free_seconds = None
        if drafted:
            self._free_seconds = time.perf_counter() - start - assistant_seconds
            self._backoff.record(
                whole.num_nodes > len(trees), self._free_seconds, self._round_seconds
            )
            if self._times is not None:
                self._times.idle_drafts = self._backoff.idle
        return self._send(whole, trees, size)

    def _draft_assistants(
        self,
        state: GenerationState,
        max_depths: Mapping[int, int],
        trees: Mapping[int, MergedTree],
        base: PlannedRound,
        limits: Mapping[int, int],
    ) -> tuple[DraftTree | None, float]:
        """Run the assistants that pay or are tried; merge their drafts into `trees`.

        `limits` are the tokens still to come, `base` the best round without assistants. Returns
        a draft that must be sent as it is, if there is one, and the expected drafting time.
        """
        reading = {s.name: self._reading_seconds(s, state, max_depths) for s in self.assistants}
        missed = self._missed_seconds if self.free else None
        horizon = Horizon(sum(limits.values()), reading, missed)
        plan = choose_sources(base, trees, self.assistants, max_depths, horizon)
        plain = PlannedRound(self._costs, len(trees), len(trees))
        if plan.rate < self._min_gain(len(trees)) * plain.rate:
            plan = base
        whole: DraftTree | None = None
        for source in self.assistants:
            drafter, depths = source.drafter, self._draft_depths(source, plan, max_depths)
            cost = self._trial_steps(source, base, len(trees), reading[source.name])
            depths = source.with_trials(depths, max_depths, cost, max(limits.values(), default=0))
            drafting_rows = [row for row, depth in depths.items() if depth]
            deepest, unread = max(depths.values(), default=0), source.unread(state, drafting_rows)
            with (
                self._timer.time_draft(source.name, drafter, deepest, unread),
                _level_cost(source, plan, len(trees)),
            ):
                source.draft(state, depths)
            self._counts[f"asked_{source.name}"] += len(drafting_rows)
            if not drafting_rows:
                continue
            self._missed_seconds.pop(source.name, None)
            # The verifiers of such trees need them as they were drafted.
            if drafter.exclusive_tree or drafter.samples or drafter.rule is not None:
                whole = source.tree
            else:
                source.merge_into(trees)
        return whole, plan.draft_seconds

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Record the round's time, and update every drafter."""
        self._timer.mark_verified()
        start = time.perf_counter()
        for source in self.free:
            source.observe(verdict, output)
        # With configured costs, nothing depends on times of this machine.
        if self._times is not None and self._free_seconds is not None:
            self._host_seconds.append(self._free_seconds + time.perf_counter() - start)
        for source in self.assistants:
            source.observe(verdict, output)

    def _send(self, tree: DraftTree, rows: Collection[int], size: float) -> DraftTree:
        """Count the round in which the target runs `tree`, as many nodes as `size`; return it."""
        self._counts["rounds"] += len(rows)
        self._counts["idle_rounds"] += sum(len(tree.nodes(row)) == 1 for row in rows)
        self._timer.mark_sent(size)
        return tree

    def _draft_free(
        self,
        state: GenerationState,
        max_depths: Mapping[int, int],
        trees: Mapping[int, MergedTree],
    ) -> bool:
        """Run the drafters without a model; return False if they wait, or nothing is wanted."""
        # With configured costs, nothing depends on times of this machine.
        if self._times is not None and self.free and not self._backoff.is_due():
            for source in self.free:
                source.skip()
            return False
        for source in self.free:
            source.draft(state, max_depths)
            source.merge_into(trees)
        return bool(self.free) and any(max_depths.values())

    def _measures_plain_steps(self, rows: int) -> bool:
        """Return True if nothing is drafted, because the cost of a plain step is not known."""
        if self._times is None or self._times.verify.is_reliable(rows):
            return False
        self._plain_steps += self._timer.was_timed
        self._rounds += 1
        return self._plain_steps < PLAIN_STEPS and self._rounds <= MOST_PLAIN_STEPS

    def _min_gain(self, rows: int) -> float:
        """Return the least rate of a round with drafts, in those of one without."""
        stale = self._times is not None and self._times.verify.is_stale(rows)
        return STALE_GAIN if stale else MIN_GAIN

    def _reading_seconds(
        self, source: DraftSource, state: GenerationState, rows: Iterable[int]
    ) -> float:
        read = self._costs.read.get(source.name)
        return read(source.unread(state, rows)) if read is not None else 0.0

    def _trial_steps(
        self, source: DraftSource, base: PlannedRound, rows: int, reading_seconds: float
    ) -> float:
        """Return the cost of the shortest draft for all rows, in steps of the target."""
        draft, verify = self._costs.draft.get(source.name), self._costs.verify
        seconds = reading_seconds + verify(base.nodes + rows) - verify(base.nodes)
        if draft is not None:
            seconds += draft(source.trial_depth)
        return seconds / max(verify(rows), 1e-9)

    def _draft_depths(
        self, source: DraftSource, plan: PlannedRound, max_depths: Mapping[int, int]
    ) -> dict[int, int]:
        """Return, per row, the depth to which an assistant drafts; 0 if it does not."""
        planned = plan.depths.get(source.name, {})
        depths = {row: planned.get(row, 0) for row in max_depths}
        if source.drafter.depth_is_planned:
            # Few depths, since each is a CUDA graph.
            depths = {row: round_up(depth) for row, depth in depths.items()}
        elif isinstance(source.policy, MeasuredPolicy):
            # It stops by itself.
            depths = {row: DEPTH_FACTOR * depth for row, depth in depths.items()}
        return {row: min(most, depths[row]) for row, most in max_depths.items()}


@contextmanager
def _level_cost(source: DraftSource, plan: PlannedRound, rows: int) -> Iterator[None]:
    """Set the costs of levels in the planned round, if the source has a `MeasuredPolicy`."""
    policy = source.policy
    drafting = sum(depth > 0 for depth in plan.depths.get(source.name, {}).values())
    if not isinstance(policy, MeasuredPolicy) or not drafting:
        yield
        return
    policy.level_cost = partial(plan.level_cost, source, drafting, rows)
    try:
        yield
    finally:
        # A reference cycle, since the source refers to the policy, would keep storage alive until
        # the garbage collector runs.
        policy.level_cost = None
