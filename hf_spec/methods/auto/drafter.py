"""Config of `auto`, and its cost model drafter, built from the assistants of the call."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_spec.adapters.published import MODELS, recognize
from hf_spec.backend.device.distributed_checks import tensor_parallel_size
from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.drafting.config import AssistantConfig
from hf_spec.drafting.cost_model.adaptive_length_drafter import AdaptiveLengthDrafter
from hf_spec.drafting.cost_model.cost_curves import OTHERS, Costs, check_timings
from hf_spec.drafting.cost_model.cost_model_drafter import Bounds, CostModelDrafter
from hf_spec.drafting.cost_model.draft_source import DraftSource
from hf_spec.methods.loading import read_once, strategy_of
from hf_spec.methods.lookup.answer_store import LookupStore
from hf_spec.methods.lookup.drafter import LookupConfig, find_store, lookup_sources
from hf_spec.methods.registry import make_for_auto, register

if TYPE_CHECKING:
    from typing_extensions import Self

# Drafts cost nothing, and 500 nodes as much as a step. So a batch of 50 rows verifies nodes if they
# are accepted in more than a tenth of the cases.
CHEAP_DRAFTS = {"verify": [[1, 1.0], [501, 2.0]], "draft": {OTHERS: [[1, 0.0]]}}


@dataclass(frozen=True)
class AutoConfig(AssistantConfig):
    """Options of `auto`.

    Attributes:
        max_draft_tokens: depth of the deepest draft.
        max_nodes: most nodes of a row sent in a round, root excluded.
        across_answers: also look up earlier answers, see `LookupConfig`. A `LookupStore` among the
            assistants is always used.
        timings: fixed costs, used instead of measurements so that all decisions are reproducible on
            other machines. A dictionary with two keys: "verify" is a list of [nodes, seconds] of
            the target's forward pass; "draft" maps each assistant to a list of [depth, seconds].
            Assistants are named by their strategy ("tree", "disco", "falcon"), a second one of the
            same strategy "tree-2"; "*" stands for all that are not named.
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

    def for_short_texts(self) -> Self:
        """Return the config with cheap drafts, see `StrategyConfig`."""
        return replace(self, timings=CHEAP_DRAFTS)


def _make(config: AutoConfig, target: PreTrainedModel, assistant: object) -> CostModelDrafter:
    if config.timings is None and tensor_parallel_size(target) > 1:
        raise UnsupportedError(
            "auto measures times, which differ among the processes of a tensor parallel model; "
            "pass the same timings= in all processes, or use another strategy"
        )
    longest = config.max_draft_tokens
    passed = _as_list(assistant)
    stores = [item for item in passed if isinstance(item, LookupStore)]
    if len(stores) > 1:
        raise AssistantError(f"assistant= has {len(stores)} LookupStores; pass at most one")
    store = find_store(config.across_answers, target, stores[0] if stores else None)
    assistants: list[DraftSource] = []
    for item in passed:
        if isinstance(item, LookupStore):
            continue
        strategy = _strategy_of(item, target)
        earlier = sum(source.name.partition("-")[0] == strategy for source in assistants)
        name = f"{strategy}-{earlier + 1}" if earlier else strategy
        drafter = make_for_auto(strategy, target, item, config)
        if isinstance(drafter, AdaptiveLengthDrafter):
            # One cost model decides about all.
            drafter = drafter.method
        assistants.append(DraftSource(name, drafter, longest))
    costs = None
    if config.timings is not None:
        names = [source.name for source in assistants if not source.drafter.exclusive_tree]
        costs = Costs.from_timings(config.timings, names)
    virtual_tokens = [s.drafter.virtual_tokens for s in assistants if s.drafter.virtual_tokens]
    if len(virtual_tokens) > 1:
        raise AssistantError(
            "assistant= has several SDSAT adapters, but the target can use the adaptive tokens of "
            "only one; pass one"
        )
    free = lookup_sources(LookupConfig(), longest, store)
    key, bounds = (config.strategy, config.batching), Bounds(longest, config.max_nodes)
    auto = CostModelDrafter(free, assistants, target, key, bounds, costs)
    auto.virtual_tokens = virtual_tokens[0] if virtual_tokens else None
    return auto


register("auto", _make)(AutoConfig)


def _as_list(assistant: object) -> list[Any]:
    if not isinstance(assistant, (list, tuple)):
        return [] if assistant is None else [assistant]
    if not assistant:
        raise AssistantError(f"assistant={assistant!r} is empty; leave it out to use only lookup")
    return list(assistant)


def _strategy_of(assistant: Any, target: PreTrainedModel) -> str:
    if isinstance(assistant, PreTrainedModel):
        family = recognize(assistant.config.to_dict())
        return family if family in MODELS else "tree"
    if not isinstance(assistant, (str, os.PathLike)):
        return getattr(assistant, "strategy", "tree")
    name = os.fspath(assistant)
    return read_once(target, "auto", name, lambda: strategy_of(name))
