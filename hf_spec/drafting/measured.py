"""Drafts as long and as wide as they are worth: what `auto` and the defaults of others share.

In every round the nodes are sent, and the levels drafted, that bring the most tokens per second:
`sources` knows what drafts like these were worth in this generation, `choice` weighs that against
what rounds cost. `auto` calibrates costs, since it chooses among drafters. A single drafter learns
them from its rounds (`costs`); `measured` makes one so, and with it `draft`, `tree`, `gsd`,
`disco`, `falcon` and `lookup` where no length is given.

Choices follow from times and from the text so far, never from a draw to come, so whatever rule
judges the drafts stays exact. Times differ from run to run, and with them the statistics.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.verification import Verifier
from hf_spec.devices.distributed_checks import tensor_parallel_size
from hf_spec.drafting.choice import Round, choose_nodes, choose_sources
from hf_spec.drafting.config import PolicyConfig
from hf_spec.drafting.costs import Costs, known_times
from hf_spec.drafting.length_policy import (
    MEASURED,
    LengthPolicy,
    MeasuredPolicy,
    free,
    make_policy,
)
from hf_spec.drafting.sources import NODES_PER_LEVEL, MergedTree, Source
from hf_spec.errors import UnsupportedError
from hf_spec.execution.runner import ForwardOutput, ModelRunner
from hf_spec.execution.tree import DraftTree, Verdict

Policed = TypeVar("Policed", bound=PolicyConfig)

# Share of what is known of a drafter that stays in a round in which it is not asked. There is no
# other, so it is tried again soon.
FADE = 0.9


class MeasuredDrafter(Drafter):
    """Asks drafters, joins their trees and sends the best nodes, `max_nodes` of a row at most.

    Sources that are `free` cost no time worth counting and are always asked; `assistants` are the
    others, with names of their own. The deepest draft has `max_draft_tokens`.

    Attributes:
        counters: "rounds", one per row and draft; "idle_rounds", those that drafted nothing;
            "asked_NAME", those in which the assistant of that name was asked.
    """

    no_candidates = (
        "lengths are measured in the engine of hf_spec, which assisted decoding does not use; give "
        "a length_policy, or numbers of tokens, which are then kept"
    )

    def __init__(
        self,
        free: Sequence[Source],
        assistants: Sequence[Source],
        max_draft_tokens: int,
        max_nodes: int,
    ):
        self.free = free
        self.assistants = assistants
        self.max_depth = max_draft_tokens
        self.max_nodes = max_nodes
        self._sources = [*free, *assistants]
        self._counted: Counter[str] = Counter()
        layers = {layer for source in self._sources for layer in source.drafter.hidden_layers}
        self.hidden_layers = tuple(sorted(layers))

    @abstractmethod
    def _learn_costs(self, state: GenerationState) -> Costs:
        """What rounds of this generation cost."""

    @property
    def counters(self) -> Mapping[str, int]:  # type: ignore[override]
        """See the class."""
        return self._counted

    @property
    def forwards(self) -> int:
        """Forward passes of all drafters."""
        return sum(source.drafter.forwards for source in self._sources)

    def start(self, state: GenerationState) -> None:
        """Learn what rounds cost; forget how the drafters fared."""
        self._counted = Counter()
        self._costs = self._learn_costs(state)
        for source in self._sources:
            source.start(state.num_rows)

    def restart(self, row: int) -> None:
        """Forget the sequence before, in every drafter."""
        for source in self._sources:
            source.restart(row)

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
        costs = self._costs
        room = {row: min(limit, self.max_depth) for row, limit in limits.items()}
        trees = {row: MergedTree(state.tokens[row][-1]) for row in room}
        for source in self.free:
            source.ask(state, {row: min(room[row], source.useful_depth(row)) for row in room})
            source.join(trees)
        base, _ = choose_nodes(costs, trees, self.max_nodes)
        chosen = choose_sources(base, trees, self.assistants, room)
        whole: DraftTree | None = None
        for source in self.assistants:
            depths = self._depths(source, chosen, room)
            source.ask(state, depths)
            asked = sum(depth > 0 for depth in depths.values())
            self._counted[f"asked_{source.name}"] += asked
            drafter = source.drafter
            # The rule that judges such trees reads how they were drafted.
            if asked and (drafter.alone or drafter.samples or drafter.rule is not None):
                whole = source.tree
            elif asked:
                source.join(trees)
        if whole is None:
            _, nodes = choose_nodes(costs, trees, self.max_nodes, chosen.draft_seconds)
            kept = {row: tree.keep(nodes[row]) for row, tree in trees.items()}
            whole = DraftTree.from_drafts(kept, state.num_rows)
        self._counted["rounds"] += len(room)
        self._counted["idle_rounds"] += sum(len(whole.nodes(row)) == 1 for row in room)
        return whole

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Every source learns what the target said."""
        for source in self._sources:
            source.observe(verdict, output)

    def _depths(self, source: Source, chosen: Round, room: Mapping[int, int]) -> dict[int, int]:
        """Per row how deep an assistant drafts, 0 where it is not asked."""
        depths = chosen.asked.get(source.name, {})
        return {row: depths.get(row, 0) for row in room}


class SelfTimedDrafter(MeasuredDrafter):
    """One kind of drafter, whose rounds tell what they cost.

    There is one source that takes time, with its policy, or any that take none. `key` tells them
    from other drafters of the target.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        target: PreTrainedModel,
        key: Any,
        max_draft_tokens: int,
        max_nodes: int,
        policy: LengthPolicy | None = None,
    ):
        takes_time = sources[0].drafter.num_forwards(1) > 0
        free, assistants = ([], sources) if takes_time else (sources, [])
        super().__init__(free, assistants, max_draft_tokens, max_nodes)
        self._target = target
        self._key = key
        self._main = sources[0]
        self._policy = policy if isinstance(policy, MeasuredPolicy) else None
        # A forward that runs a prompt tells nothing of the others; a head that reads the target's
        # features has its own a round later than the target.
        self._is_first = self._is_first_draft = True
        self._drafted = (0, 0.0, 0.0)

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

    def restart(self, row: int) -> None:
        """Forget the sequence before, and do not time the next round."""
        super().restart(row)
        self._is_first = self._is_first_draft = True

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """See `MeasuredDrafter`; the clock runs."""
        before, start = self.forwards, time.perf_counter()
        tree = super().draft(state, limits)
        if self._policy is not None:
            # It knows the drafter, which knows the policy: storage would wait for the collector.
            self._policy.price = free
        if self.assistants:
            # Levels that the policy left out tell nothing.
            self._main.limits = {row: self._main.tree.height(row) for row in limits}
        now = time.perf_counter()
        self._drafted = self.forwards - before, now - start, now
        return tree

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Learn what the round took and brought."""
        forwards, draft_seconds, sent = self._drafted
        if not self._is_first:
            verify_seconds = time.perf_counter() - sent
            timed = 0 if self._is_first_draft else forwards
            self._times.learn(verdict.tree.num_nodes, verify_seconds, timed, draft_seconds)
        self._is_first = False
        self._is_first_draft = self._is_first_draft and not forwards
        super().observe(verdict, output)
        if self._policy is not None:
            for row, reached in self._main.reached.items():
                height = self._main.tree.height(row)
                self._policy.learn(row, height, reached, len(verdict.tokens(row)))

    def _learn_costs(self, state: GenerationState) -> Costs:
        self._is_first = self._is_first_draft = True
        name, drafter = self._main.name, self._main.drafter
        owner = drafter.timing_key if self.assistants else None
        self._times = known_times(self._target, (name, owner, self._key), state.num_rows)
        return self._times.costs(name, drafter.num_forwards)

    def _depths(self, source: Source, chosen: Round, room: Mapping[int, int]) -> dict[int, int]:
        """A drafter that is asked may go on as long as its policy lets it."""
        asked = {row for row, depth in chosen.asked.get(source.name, {}).items() if depth}
        if self._policy is not None and asked:
            self._policy.price = partial(chosen.level_price, source, len(asked), len(room))
        return {row: limit if row in asked else 0 for row, limit in room.items()}


def measured(
    drafter: Drafter,
    policy: LengthPolicy,
    target: PreTrainedModel,
    config: PolicyConfig,
    nodes_per_level: int,
) -> SelfTimedDrafter:
    """The same drafts, as long and as wide as they are worth, at so many nodes a level."""
    depth = drafter.max_depth
    source = Source(config.strategy, drafter, depth, nodes_per_level=nodes_per_level, fade=FADE)
    most = getattr(config, "max_nodes", None) or depth
    return SelfTimedDrafter([source], target, config.batching, depth, most, policy)


def can_measure(target: PreTrainedModel) -> bool:
    """Whether times may decide: not among processes that must take the same steps."""
    return tensor_parallel_size(target) == 1


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
    config = resolve(config, target)
    policy = make_policy(config, target)
    drafter = make(config, policy=policy)
    if config.length_policy != MEASURED:
        return drafter
    return measured(drafter, policy, target, config, min(children, NODES_PER_LEVEL))
