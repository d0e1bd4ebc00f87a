"""Drafts from whatever is available, in every round what brings the most tokens per second.

Lookup is always available; draft models and adapters are if `assistant=` names them. All that is
proposed for a row becomes one tree, from which the nodes that are worth their time are sent. What a
node is worth follows from how drafts like it fared in this generation
(`hf_spec.drafting.cost_model.acceptance_stats`), what it costs from the rounds themselves
(`hf_spec.drafting.cost_model.cost_curves`); `hf_spec.drafting.cost_model.selection` weighs the two,
and what drafts that disappoint may cost is bounded (`hf_spec.drafting.cost_model.loss_budget`).
Where nothing pays nothing is drafted.

Every choice follows from the text so far, and no draft is random, so node draw judges the tree and
the output stays the target's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_spec.adapters.published import MODELS, recognize
from hf_spec.backend.device.distributed_checks import tensor_parallel_size
from hf_spec.common.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.cost_model.acceptance_stats import DraftSource
from hf_spec.drafting.cost_model.cost_curves import Costs, check_timings
from hf_spec.drafting.cost_model.cost_model_drafter import Bounds, CostModelDrafter
from hf_spec.methods.loading import read_once, strategy_of
from hf_spec.methods.lookup.answer_store import LookupStore
from hf_spec.methods.lookup.drafter import LookupConfig, find_store, lookup_sources
from hf_spec.methods.registry import make_for_auto, register


@dataclass(frozen=True)
class AutoConfig(StrategyConfig):
    """Options of the choice among drafters.

    Attributes:
        max_draft_tokens: depth of the deepest draft.
        max_nodes: most nodes of a row sent in a round, root excluded.
        across_answers: look up in the answers of earlier calls, too, see `LookupConfig`. A
            `LookupStore` among the assistants is used in any case.
        timings: what rounds cost, instead of what is measured, so that every choice can be repeated
            on another machine. A dictionary of two: "verify", a list of [nodes, seconds] of a
            forward of the target, and "draft", for each assistant by its strategy's name ("tree",
            "disco", "falcon"; a second one of the same name is "tree-2") a list of [depth,
            seconds].
    """

    adapter_methods = None
    takes_tokenizers = True

    max_draft_tokens: int = 16
    max_nodes: int = 40
    across_answers: bool = False
    timings: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_draft_tokens", "max_nodes"):
            self.check(name, 1)
        self.check_flags("across_answers")
        if self.timings is not None:
            check_timings(self.timings)


class AutoDrafter(CostModelDrafter):
    """Lookups, and assistants whose costs are measured or given."""

    def __init__(
        self,
        config: AutoConfig,
        target: PreTrainedModel,
        free: Sequence[DraftSource],
        assistants: Sequence[DraftSource],
    ):
        costs = None if config.timings is None else Costs.of(config.timings)
        bounds = Bounds(config.max_draft_tokens, config.max_nodes)
        super().__init__(
            free, assistants, target, (config.strategy, config.batching), bounds, costs
        )
        drafters = [source.drafter for source in [*free, *assistants]]
        own = [d.virtual_tokens for d in drafters if d.virtual_tokens is not None]
        if len(own) > 1:
            raise AssistantError(
                "assistant= has several SDSAT adapters; the target can have adaptive tokens of one"
            )
        self.virtual_tokens = own[0] if own else None


def _make(config: AutoConfig, target: PreTrainedModel, assistant: object) -> AutoDrafter:
    if config.timings is None and tensor_parallel_size(target) > 1:
        raise UnsupportedError(
            "auto measures times, which differ among the processes of a tensor parallel model; "
            "give it timings=, the same in all of them, or choose another strategy"
        )
    longest = config.max_draft_tokens
    given_assistants = _as_list(assistant)
    stores = [given for given in given_assistants if isinstance(given, LookupStore)]
    if len(stores) > 1:
        raise AssistantError(f"assistant= has {len(stores)} stores of answers; give one")
    store = find_store(config.across_answers, target, stores[0] if stores else None)
    assistants: list[DraftSource] = []
    for given in given_assistants:
        if isinstance(given, LookupStore):
            continue
        strategy = _strategy_of(given, target)
        earlier = sum(source.name.partition("-")[0] == strategy for source in assistants)
        name = f"{strategy}-{earlier + 1}" if earlier else strategy
        drafter = make_for_auto(strategy, target, given, config.batching)
        assistants.append(DraftSource(name, drafter, longest))
    if config.timings is not None:
        lacking = [s.name for s in assistants if s.name not in config.timings["draft"]]
        if missing := [name for name in lacking if not name.startswith("sdsat")]:
            raise OptionError(
                f"timings['draft'] lacks {missing[0]!r}; it has "
                f"{', '.join(map(repr, config.timings['draft'])) or 'nothing'}"
            )
    free = lookup_sources(LookupConfig(), longest, store)
    return AutoDrafter(config, target, free, assistants)


register("auto", _make)(AutoConfig)


def _as_list(assistant: object) -> list[Any]:
    if not isinstance(assistant, (list, tuple)):
        return [] if assistant is None else [assistant]
    if not assistant:
        raise AssistantError(
            f"assistant={assistant!r} names nothing; leave it out for lookup alone"
        )
    return list(assistant)


def _strategy_of(assistant: Any, target: PreTrainedModel) -> str:
    """The strategy that an assistant is for: adapters and heads name one, a model's is "tree"."""
    if isinstance(assistant, PreTrainedModel):
        family = recognize(assistant.config.to_dict())
        return family if family in MODELS else "tree"
    if not isinstance(assistant, (str, os.PathLike)):
        return getattr(assistant, "strategy", "tree")
    name = os.fspath(assistant)

    return read_once(target, "auto", name, lambda: strategy_of(name))
