"""Drafts as long and as wide as they are worth: what `auto` and the defaults of others share.

In every round the nodes are sent, and the levels drafted, that bring the most tokens per second:
`sources` knows what drafts like these were worth, `choice` weighs that against what rounds cost,
which is learned from them (`costs`), and `allowance` bounds what all this may lose. `measured`
makes a single drafter so, and with it `draft`, `tree`, `gsd`, `disco`, `falcon` and `lookup` where
no length is given.

Choices follow from times and from the text so far, never from a draw to come, so whatever rule
judges the drafts stays exact. Times differ from run to run, and with them the statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedModel

from hf_spec.backend.device.clock import clock_of
from hf_spec.backend.device.distributed_checks import tensor_parallel_size
from hf_spec.common.errors import UnsupportedError
from hf_spec.drafting.config import PolicyConfig
from hf_spec.drafting.cost_model.acceptance_stats import NODES_PER_LEVEL, DraftSource, MergedTree
from hf_spec.drafting.cost_model.cost_curves import Costs, RoundTimes, known_times
from hf_spec.drafting.cost_model.loss_budget import LossBudget
from hf_spec.drafting.cost_model.round_timer import RoundClock
from hf_spec.drafting.cost_model.selection import (
    Round,
    RoundFilter,
    always,
    choose_nodes,
    choose_sources,
    never,
)
from hf_spec.drafting.length_policy import (
    MEASURED,
    LengthPolicy,
    MeasuredPolicy,
    free,
    make_policy,
)
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.models.recurrent_layers import recurrent_share
from hf_spec.engine.runner import ModelRunner

Policed = TypeVar("Policed", bound=PolicyConfig)

# Share of what is known of a drafter that stays in a round in which it is not asked. There is no
# other, so it is tried again soon.
FADE = 0.95
# Steps without drafts at the beginning of a generation, where their price is not known.
PLAIN_STEPS = 2


@dataclass(frozen=True)
class Bounds:
    """Levels of the deepest draft, and most nodes of a row that are sent, root excluded."""

    max_draft_tokens: int
    max_nodes: int


class CostModelDrafter(Drafter):
    """Asks drafters, joins their trees and sends the best nodes, `max_nodes` of a row at most.

    Sources that are `free` cost no time worth counting and are always asked; `assistants` are the
    others, with names of their own. The deepest draft has `max_draft_tokens`.

    Rounds tell what they cost, and drafts how they fare, which stays with the target; `key` is what
    both belong to besides the drafters. Where `costs` are given, nothing is timed or remembered.
    Until the price of a step without drafts is known, such steps are made. What drafts may lose is
    bounded (`hf_spec.drafting.cost_model.loss_budget`).

    Attributes:
        counters: "rounds", one per row and draft; "idle_rounds", those that drafted nothing;
            "asked_NAME", those in which the assistant of that name was asked.
    """

    assisted_refusal_reason = (
        "lengths are measured in the engine of hf_spec, which assisted decoding does not use; give "
        "a length_policy, or numbers of tokens, which are then kept, and for trees max_nodes"
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
        self._given_costs = costs
        self._sources = [*free, *assistants]
        self._counted: Counter[str] = Counter()
        layers = {layer for source in self._sources for layer in source.drafter.hidden_layers}
        self.hidden_layers = tuple(sorted(layers))

    @property
    def counters(self) -> Mapping[str, int]:  # type: ignore[override]
        """See the class."""
        return self._counted

    @property
    def forwards(self) -> int:
        """Forward passes of all drafters."""
        return sum(source.drafter.forwards for source in self._sources)

    def start(self, state: GenerationState) -> None:
        """Recall what rounds cost and how drafts fared."""
        self._counted = Counter()
        self._allowance = LossBudget()
        self._times: RoundTimes | None = None
        costs = self._given_costs
        if costs is None:
            # Who drafts in the target's own forward has no times.
            timed = [s for s in self.assistants if not s.drafter.exclusive_tree]
            owners = tuple((s.name, s.drafter.timing_key) for s in timed)
            key = owners, len(self.assistants), len(self.free), self._key
            self._times = known_times(self._target, key, state.num_rows)
            costs = self._times.costs({s.name: s.drafter.num_forwards for s in self.assistants})
        branch = recurrent_share(self._target.config.get_text_config())
        self._costs = replace(costs, branch=branch)
        for index, source in enumerate(self._sources):
            times = self._times
            known = None if times is None else times.memory(index, source.expected)
            source.start(state.num_rows, known)
        self._plain_steps = 0
        self._allows: RoundFilter = always
        clock = clock_of(state.device)
        self._rounds = RoundClock(clock, self._costs, self._times, self._allowance)

    def restart(self, row: int) -> None:
        """Forget the sequence before, in every drafter, and do not time the next round."""
        for source in self._sources:
            source.restart(row)
        self._rounds.restart()

    def prefill(self, run: Callable[[ModelRunner], object]) -> None:
        """Every drafter may have a model that reads more than tokens."""
        for source in self._sources:
            source.drafter.prefill(run)

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Make every drafter ready."""
        with super().active(state), ExitStack() as stack:
            for source in self._sources:
                stack.enter_context(source.drafter.active(state))
            yield

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """The best nodes of all that is proposed, or a tree that must stay whole."""
        self._rounds.begin()
        costs = self._costs
        room = {row: min(limit, self.max_depth) for row, limit in limits.items()}
        trees = {row: MergedTree(state.tokens[row][-1]) for row in room}
        self._allows = self._rule(len(room))
        for source in self.free:
            source.ask(state, {row: min(room[row], source.useful_depth(row)) for row in room})
            source.join(trees)
        base, _ = choose_nodes(costs, trees, self.max_nodes, allows=self._allows)
        chosen = choose_sources(base, trees, self.assistants, room, self._allows)
        whole: DraftTree | None = None
        for source in self.assistants:
            depths = self._depths(source, chosen, room)
            self._ask(source, state, depths)
            asked = sum(depth > 0 for depth in depths.values())
            self._counted[f"asked_{source.name}"] += asked
            drafter = source.drafter
            # The rule that judges such trees reads how they were drafted.
            if asked and (drafter.exclusive_tree or drafter.samples or drafter.rule is not None):
                whole = source.tree
            elif asked:
                source.join(trees)
        if whole is None:
            # What drafting took beyond what was expected is no reason to send less of it.
            spent = chosen.draft_seconds or self._rounds.draft_seconds()
            best, nodes = choose_nodes(costs, trees, self.max_nodes, spent, self._allows)
            kept = {row: tree.keep(nodes[row]) for row, tree in trees.items()}
            whole, size = DraftTree.from_drafts(kept, state.num_rows), best.nodes
        else:
            size = whole.num_nodes
        self._counted["rounds"] += len(room)
        self._counted["idle_rounds"] += sum(len(whole.nodes(row)) == 1 for row in room)
        self._rounds.sent(size, chosen.draft_seconds)
        return whole

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Learn what the round took and brought; every source learns what the target said."""
        rows = [row for row in range(len(verdict.accepted)) if verdict.tree.nodes(row)]
        self._rounds.judged(len(rows), sum(len(verdict.tokens(row)) for row in rows))
        for source in self._sources:
            source.observe(verdict, output)

    def _rule(self, rows: int) -> RoundFilter:
        """Which rounds may be made: none with drafts until the price of those without is known."""
        plain = self._costs.verify(rows)
        known = self._times is None or self._times.knows_plain(rows)
        if self._plain_steps < PLAIN_STEPS and not known:
            # The first round runs the prompt, and is not timed.
            self._plain_steps += not self._rounds.is_first
            return never
        allowance = self._allowance
        return lambda tokens, seconds: allowance.allows(tokens / rows, seconds, plain)

    def _ask(self, source: DraftSource, state: GenerationState, depths: Mapping[int, int]) -> None:
        """Let an assistant draft; the clock runs."""
        with self._rounds.drafting(source.name, source.drafter, max(depths.values(), default=0)):
            source.ask(state, depths)

    def _depths(
        self, source: DraftSource, chosen: Round, room: Mapping[int, int]
    ) -> dict[int, int]:
        """Per row how deep an assistant drafts, 0 where it is not asked."""
        depths = chosen.asked.get(source.name, {})
        return {row: depths.get(row, 0) for row in room}


class AdaptiveLengthDrafter(CostModelDrafter):
    """One kind of drafter: one source that takes time, with its policy, or any that take none.

    With a policy that goes by something else than time, it drafts in every round what that says,
    and the nodes to send are what is chosen. `key` tells them from other drafters of the target.
    """

    def __init__(
        self,
        sources: Sequence[DraftSource],
        target: PreTrainedModel,
        key: Hashable,
        bounds: Bounds,
        policy: LengthPolicy | None = None,
    ):
        takes_time = sources[0].drafter.num_forwards(1) > 0
        free, assistants = ([], sources) if takes_time else (sources, [])
        super().__init__(free, assistants, target, (sources[0].name, key), bounds)
        self._main = sources[0]
        self._policy = policy if isinstance(policy, MeasuredPolicy) else None
        self._drafts_always = policy is not None and self._policy is None

    @property
    def counters(self) -> Mapping[str, int]:  # type: ignore[override]
        """Those of the drafter too."""
        return {**self._main.drafter.counters, **self._counted}

    @property
    def samples(self) -> bool:  # type: ignore[override]
        """Whether the drafter draws at random."""
        return self._main.drafter.samples

    @property
    def graphs(self) -> Mapping[int, Any]:
        """Of a drafter with a draft model: per row the graph of the newest draft."""
        found: Mapping[int, Any] = getattr(self._main.drafter, "graphs", {})
        return found

    def make_verifier(self, processors: Sequence[Any], num_rows: int) -> Verifier:
        """The drafter's own rule."""
        return self._main.drafter.make_verifier(processors, num_rows)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """See `CostModelDrafter`."""
        tree = super().draft(state, limits)
        if self._policy is not None:
            # It knows the drafter, which knows the policy: storage would wait for the collector.
            self._policy.price = free
        if self.assistants:
            # Levels that the policy left out tell nothing.
            self._main.limits = {row: self._main.tree.height(row) for row in limits}
        return tree

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """The policy learns, too."""
        super().observe(verdict, output)
        if self._policy is not None:
            for row, reached in self._main.reached.items():
                height = self._main.tree.height(row)
                self._policy.learn(row, height, reached, len(verdict.tokens(row)))

    def _depths(
        self, source: DraftSource, chosen: Round, room: Mapping[int, int]
    ) -> dict[int, int]:
        """A drafter that is asked may go on as long as its policy lets it, and the round may."""
        if self._drafts_always:
            return dict.fromkeys(room, 0) if self._allows is never else dict(room)
        asked = {row: depth for row, depth in chosen.asked.get(source.name, {}).items() if depth}
        if self._policy is not None and asked:
            self._policy.price = partial(chosen.level_price, source, len(asked), len(room))
        longest = self._longest(source, len(asked), len(room))
        return {
            row: min(limit, max(longest, asked[row])) if row in asked else 0
            for row, limit in room.items()
        }

    def _rule(self, rows: int) -> RoundFilter:
        """Where drafts are given the allowance is not asked."""
        rule = super()._rule(rows)
        return always if self._drafts_always and rule is not never else rule

    def _longest(self, source: DraftSource, asked: int, rows: int) -> int:
        """Levels that may all fail; of a tree, the nodes to send are chosen when it is there."""
        draft, verify = self._costs.draft[source.name], self._costs.verify
        sent = asked if source.nodes_per_level == 1 else 0
        depth = 0
        while depth < source.depth and self._allows(
            0.0, draft(depth + 1) + verify(rows + sent * (depth + 1))
        ):
            depth += 1
        return depth


def measured(
    drafter: Drafter,
    policy: LengthPolicy,
    target: PreTrainedModel,
    config: PolicyConfig,
    nodes_per_level: int,
) -> AdaptiveLengthDrafter:
    """The same drafts, as long and as wide as they are worth, at so many nodes a level."""
    depth = drafter.max_depth
    source = DraftSource(
        config.strategy, drafter, depth, nodes_per_level=nodes_per_level, fade=FADE
    )
    most = getattr(config, "max_nodes", None) or depth
    # A policy may go beyond the length that it starts with.
    source.depth = max(depth, policy.longest)
    bounds = Bounds(source.depth, most)
    return AdaptiveLengthDrafter([source], target, config.batching, bounds, policy)


def can_measure(target: PreTrainedModel) -> bool:
    """Whether times may decide: not among processes that must take the same steps."""
    return tensor_parallel_size(target) == 1


def selects_nodes_by_cost(config: PolicyConfig, target: PreTrainedModel) -> bool:
    """Whether as many nodes are sent as are worth their time, where that can be."""
    return config.selects_nodes_by_cost and can_measure(target)


def resolve(config: Policed, target: PreTrainedModel) -> Policed:
    """The config with a policy and sizes, measured where that can be and nothing is given."""
    possible = can_measure(target)
    if config.length_policy == MEASURED and not possible:
        raise UnsupportedError(
            "length_policy='measured' goes by times, which differ among the processes of a tensor "
            "parallel model; leave it out, and the usual sizes are kept"
        )
    return config.resolve(possible)


def with_policy(
    config: Policed, target: PreTrainedModel, make: Callable[..., Drafter], children: int
) -> Drafter:
    """A drafter that its length policy ends, or measured time where nothing else is asked for.

    Args:
        config: with or without sizes.
        target: the model that is drafted for.
        make: called with the config, its sizes filled in, and `policy=`.
        children: most tokens that it drafts after one.
    """
    weighs = selects_nodes_by_cost(config, target)
    config = resolve(config, target)
    policy = make_policy(config, target)
    drafter = make(config, policy=policy)
    if config.length_policy != MEASURED and not weighs:
        return drafter
    return measured(drafter, policy, target, config, min(children, NODES_PER_LEVEL))
