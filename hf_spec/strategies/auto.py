"""Drafts from whatever is at hand, in every round what brings the most tokens per second.

Lookup is always at hand; draft models and adapters are if `assistant=` names them. All that is
proposed for a row becomes one tree, from which the nodes that are worth their time are sent. What a
node is worth follows from how drafts like it fared in this generation (`auto_sources`), what it
costs from a short calibration on this machine (`auto_costs`); `auto_choice` weighs the two. Where
nothing pays nothing is drafted.

Every choice follows from the text so far, and no draft is random, so node draw judges the tree and
the output stays the target's own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from hf_spec.adapters.folder import STRATEGIES, SpecAdapter, is_adapter, load_adapter
from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.runner import ForwardOutput
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.tree import DraftTree, Verdict
from hf_spec.distributed_checks import tensor_parallel_size
from hf_spec.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.models.assistant import read_once
from hf_spec.models.falcon_head import FalconHead
from hf_spec.strategies.auto_choice import choose_nodes, choose_sources
from hf_spec.strategies.auto_costs import Costs, check_timings, known_costs
from hf_spec.strategies.auto_sources import MergedTree, Source
from hf_spec.strategies.base import StrategyConfig, make_drafter, register
from hf_spec.strategies.disco import DiscoConfig
from hf_spec.strategies.draft_model import DraftModelDrafter, TreeConfig
from hf_spec.strategies.falcon import FalconConfig, FalconDrafter
from hf_spec.strategies.lookup import LookupConfig, LookupDrafter
from hf_spec.strategies.sdsat import SdsatConfig, SdsatDrafter

# Lookups by length of the n-gram, shortest and longest, with the shares of their first and of their
# further tokens that are expected to be accepted: the longer a repeated run, the longer it goes on.
# Measured on SmolLM2-135M-Instruct, 60 prompts of six tasks; a start, which a generation corrects.
LOOKUPS = ((1, 1, 0.2, 0.5), (2, 2, 0.5, 0.75), (3, 8, 0.8, 0.9))
# What a draft model may grow before the nodes are chosen.
TREE = TreeConfig(max_draft_tokens=5, max_nodes=24)


@dataclass(frozen=True)
class AutoConfig(StrategyConfig):
    """Options of the choice among drafters.

    Attributes:
        max_draft_tokens: depth of the deepest draft.
        max_nodes: most nodes of a row sent in a round, root excluded.
        timings: what rounds cost, instead of a calibration, so that every choice can be repeated
            on another machine. A dictionary of two: "verify", a list of [nodes, seconds] of a
            forward of the target, and "draft", for each assistant by its strategy's name ("tree",
            "disco", "falcon"; a second one of the same name is "tree-2") a list of [depth,
            seconds].
    """

    adapter_methods = tuple(STRATEGIES)

    max_draft_tokens: int = 16
    max_nodes: int = 40
    timings: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_draft_tokens", "max_nodes"):
            self.check(name, 1)
        if self.timings is not None:
            check_timings(self.timings)


class AutoDrafter(Drafter):
    """Asks drafters, joins their trees and sends the best nodes.

    Args:
        config: limits, and timings if they are given.
        target: the model that generates.
        free: sources that cost no time worth counting; always asked.
        assistants: the others, with names of their own.

    Attributes:
        counters: "rounds", one per row and draft; "idle_rounds", those that drafted nothing;
            "asked_NAME", those in which the assistant of that name was asked.
    """

    no_candidates = (
        "auto weighs what a tree costs in the engine of hf_spec, which assisted decoding does not "
        "use; use spec_strategy='auto'"
    )

    def __init__(
        self,
        config: AutoConfig,
        target: PreTrainedModel,
        free: Sequence[Source],
        assistants: Sequence[Source],
    ):
        self.config = config
        self.target = target
        self.free = free
        self.assistants = assistants
        self._sources = [*free, *assistants]
        self._costs: Costs | None = None
        self.counters: Counter[str] = Counter()
        drafters = [source.drafter for source in self._sources]
        self.hidden_layers = tuple(sorted({layer for d in drafters for layer in d.hidden_layers}))
        own = [d.virtual_tokens for d in drafters if d.virtual_tokens is not None]
        if len(own) > 1:
            raise AssistantError(
                "assistant= has several SDSAT adapters; the target can have adaptive tokens of one"
            )
        self.virtual_tokens = own[0] if own else None

    @property
    def forwards(self) -> int:
        """Forward passes of all drafters."""
        return sum(source.drafter.forwards for source in self._sources)

    def start(self, state: GenerationState) -> None:
        """Learn what rounds cost; forget how the drafters fared."""
        self.counters = Counter()
        timings, batching = self.config.timings, self.config.batching
        timed = {s.name: s.drafter for s in self.assistants if not s.alone}
        self._costs = (
            known_costs(self.target, timed, state, batching)
            if timings is None
            else Costs.of(timings)
        )
        for source in self._sources:
            source.start(state.num_rows)

    def restart(self, row: int) -> None:
        """Forget the sequence before, in every drafter."""
        for source in self._sources:
            source.restart(row)

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Make every drafter ready."""
        with super().active(state), ExitStack() as stack:
            for source in self._sources:
                stack.enter_context(source.drafter.active(state))
            yield

    def draft(self, state: GenerationState) -> DraftTree:
        """The best nodes of all that is proposed, or a tree that must stay whole."""
        costs = self._costs
        assert costs is not None, "drafting happens while active"
        most = self.config.max_nodes
        room = {
            row: min(state.room(row) - 1, self.config.max_draft_tokens) for row in state.unfinished
        }
        trees = {row: MergedTree(state.tokens[row][-1]) for row in room}
        for source in self.free:
            source.ask(state, {row: min(room[row], source.useful_depth(row)) for row in room})
            _merge(trees, source)
        base, _ = choose_nodes(costs, trees, most)
        chosen = choose_sources(base, trees, self.assistants, room)
        whole: DraftTree | None = None
        for source in self.assistants:
            limits = chosen.asked.get(source.name, {})
            source.ask(state, {row: limits.get(row, 0) for row in room})
            self.counters[f"asked_{source.name}"] += sum(limits.get(row, 0) > 0 for row in room)
            if source.alone and source.name in chosen.asked:
                whole = source.tree
            elif source.name in chosen.asked:
                _merge(trees, source)
        if whole is None:
            _, nodes = choose_nodes(costs, trees, most, chosen.draft_seconds)
            rows: list[tuple[list[int], list[int]]] = [([], []) for _ in state.tokens]
            for row, tree in trees.items():
                rows[row] = tree.keep(nodes[row])
            whole = DraftTree.from_rows(rows)
        self._count(whole, state)
        return whole

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Every source hears what the target said."""
        for source in self._sources:
            source.observe(verdict, output)

    def _count(self, tree: DraftTree, state: GenerationState) -> None:
        self.counters["rounds"] += len(state.unfinished)
        idle = sum(len(tree.host.nodes(row)) == 1 for row in state.unfinished)
        self.counters["idle_rounds"] += idle


def _make(config: AutoConfig, target: PreTrainedModel, assistant: object) -> AutoDrafter:
    if config.timings is None and tensor_parallel_size(target) > 1:
        raise UnsupportedError(
            "auto measures times, which differ among the processes of a tensor parallel model; "
            "give it timings=, the same in all of them, or choose another strategy"
        )
    longest = config.max_draft_tokens
    free = []
    for shortest, match, first, further in LOOKUPS:
        lookup = LookupConfig(
            match_length=match,
            min_match_length=shortest,
            copy_length=longest,
            max_draft_tokens=2 * longest,
        )
        free.append(Source("lookup", LookupDrafter(lookup), longest, first, further))
    assistants: list[Source] = []
    for given in _as_list(assistant):
        strategy = _strategy_of(given, target)
        earlier = sum(source.name.partition("-")[0] == strategy for source in assistants)
        name = f"{strategy}-{earlier + 1}" if earlier else strategy
        drafter, depth = _drafter_of(strategy, target, given, config.batching)
        assistants.append(Source(name, drafter, min(depth, longest)))
    if config.timings is not None:
        lacking = [s.name for s in assistants if s.name not in config.timings["draft"]]
        if missing := [name for name in lacking if not name.startswith("sdsat")]:
            raise OptionError(
                f"timings['draft'] lacks {missing[0]!r}; it has "
                f"{', '.join(map(repr, config.timings['draft'])) or 'nothing'}"
            )
    return AutoDrafter(config, target, free, assistants)


register("auto", _make)(AutoConfig)


def _merge(trees: dict[int, MergedTree], source: Source) -> None:
    for row, tree in trees.items():
        tree.add(source, row)


def _as_list(assistant: object) -> list[Any]:
    if assistant is None:
        return []
    if isinstance(assistant, (list, tuple)):
        if not assistant:
            raise AssistantError(
                f"assistant={assistant!r} names nothing; leave it out for lookup alone"
            )
        return list(assistant)
    return [assistant]


def _strategy_of(assistant: Any, target: PreTrainedModel) -> str:
    """The strategy that an assistant is for."""
    if isinstance(assistant, FalconHead):
        return "falcon"
    if isinstance(assistant, SpecAdapter):
        return assistant.strategy
    if not isinstance(assistant, (str, os.PathLike)):
        return "tree"
    name = os.fspath(assistant)
    return read_once(target, "auto", name, lambda: _strategy_in(name))


def _strategy_in(name: str) -> str:
    """The strategy that a folder or a repository of the Hub is for; a model's is "tree"."""
    return load_adapter(name).strategy if is_adapter(name) else "tree"


def _drafter_of(
    strategy: str, target: PreTrainedModel, assistant: Any, batching: str
) -> tuple[Drafter, int]:
    """A drafter without chance, and how deep it goes."""
    grown = replace(TREE, batching=batching)
    if strategy == "falcon":
        head = make_drafter(FalconConfig(), target, assistant)
        assert isinstance(head, FalconDrafter), "what spec_strategy='falcon' makes"
        # Which of the nodes are worth sending is decided here.
        head.max_nodes = None
        return head, head.plan.height
    if strategy == "sdsat":
        own = make_drafter(SdsatConfig(fused=True), target, assistant)
        assert isinstance(own, SdsatDrafter), "what spec_strategy='sdsat' makes"
        return own, own.length
    if strategy == "disco":
        chain = make_drafter(DiscoConfig(), target, assistant)
        assert isinstance(chain, DraftModelDrafter), "what spec_strategy='disco' makes"
        tree = DraftModelDrafter(grown, chain.model, chain.policy, chain.vocab_size)
        return tree, chain.policy.max_draft_tokens
    return make_drafter(grown, target, assistant), int(grown.max_draft_tokens or 0)
