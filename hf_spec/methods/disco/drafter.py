"""DISCO: a chain of draft tokens whose length a trained classifier decides, token by token.

After every draft token the classifier estimates from the draft model's distribution whether the
target will accept it; below a threshold the row stops drafting, and the token that made it stop is
sent along (Mamou et al. 2024, arXiv 2405.04304). Threshold and longest draft are calibrated on
measured latency and stored in the adapter. The same classifier serves trees and graphs as
`length_policy="disco"`, where it judges the end of each row's likeliest path.

The classifier never sees the target, so the output stays the target's own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter, beside, load_adapter
from hf_spec.adapters.reading import whole_number
from hf_spec.backend.device.transfer import send
from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.drafting.cost_model.cost_model_drafter import can_measure, measured
from hf_spec.drafting.length_policy import (
    DraftedToken,
    LengthPolicy,
    MeasuredPolicy,
    register_policy,
)
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.methods.disco.classifier import METHOD, DiscoClassifier, draft_features
from hf_spec.methods.draft_model.config import DraftConfig, wide_tree
from hf_spec.methods.draft_model.drafter import DraftModelConfig
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.draft_model.other_tokenizer.assistant import Draft, Translated, find_draft
from hf_spec.methods.draft_model.truncated import truncated_draft
from hf_spec.methods.registry import register

# More than any draft that was ever worth it.
LONGEST = 1024


@dataclass
class DiscoPolicy(LengthPolicy):
    """Stop after a token that the classifier thinks will be rejected.

    The longest draft is the paper's SL_max; `threshold`, its tau, is the least probability of
    acceptance at which a row drafts on.
    """

    threshold: float
    classifier: DiscoClassifier

    @torch.no_grad()
    def score(self, draft_probs: Tensor, positions: Sequence[int]) -> Tensor:
        """(M,) the classifier's probability that the token drafted from each is accepted."""
        (places,) = send([torch.tensor(positions)], draft_probs.device)
        classifier = self.classifier.to(draft_probs.device)
        return classifier(draft_features(draft_probs, places)).sigmoid()

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Whether each token is likely enough to be accepted."""
        return [token.score >= self.threshold for token in newest]


class MeasuredDiscoPolicy(MeasuredPolicy):
    """The classifier says how likely the next level is; time, not its threshold, decides."""

    def __init__(self, classified: DiscoPolicy):
        super().__init__(classified.max_draft_tokens)
        self.score = classified.score  # type: ignore[method-assign]

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Whether each row's next token is worth its price; all before it have to be accepted."""
        draft_seconds = ([1.0, *self._reach[token.row]][-1] for token in newest)
        pairs = zip(newest, draft_seconds, strict=True)
        return super().goes_on([replace(one, reach=reach * one.score) for one, reach in pairs])


def make_policy(config: DraftModelConfig, target: PreTrainedModel) -> DiscoPolicy:
    """The policy that `length_policy="disco"` stands for, from the adapter the config names."""
    if config.adapter is None:
        raise OptionError(
            "length_policy='disco' needs a trained classifier: adapter=<folder or Hub id>, made by "
            "`hf-spec train disco`"
        )
    return _policy_of(read_adapter(config.adapter), config, target)


def _policy_of(
    adapter: SpecAdapter, config: DraftModelConfig, target: PreTrainedModel
) -> DiscoPolicy:
    adapter.base.check(target)
    longest, threshold = config.max_draft_tokens, config.acceptance_threshold
    return DiscoPolicy(
        _stored(adapter, "max_draft_tokens", 1, LONGEST, int) if longest is None else longest,
        _stored(adapter, "threshold", 0, 1, float, int) if threshold is None else threshold,
        DiscoClassifier.from_adapter(adapter),
    )


def _stored(adapter: SpecAdapter, name: str, low: float, high: float, *kinds: type) -> Any:
    value: Any = adapter.options.get(name)
    if type(value) not in kinds or not low <= value <= high:
        raise AssistantError(
            f"{adapter.folder or 'the adapter'} has {name}={value!r}; calibrate it: "
            "hf-spec calibrate disco"
        )
    return value


register_policy("disco", make_policy)


def _find_parts(
    config: DiscoConfig, target: PreTrainedModel, assistant: object
) -> tuple[Draft, DiscoPolicy]:
    """The draft model, and the policy by which the classifier alone ends its drafts."""
    if config.adapter is not None:
        return find_draft(METHOD, assistant, target), make_policy(config, target)
    if isinstance(assistant, Translated):
        raise AssistantError(
            "assistant_tokenizer= is for a draft model; name the classifier apart from it: "
            "spec_strategy=DiscoConfig(adapter=<DISCO adapter>), assistant=<draft model>"
        )
    adapter = _adapter_of(assistant)
    policy = _policy_of(adapter, config, target)
    return Draft(find_draft_model(adapter, target)), policy


def _make_drafter(config: DiscoConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    draft, classified = _find_parts(config, target, assistant)
    measures = config.leaves_sizes_open and can_measure(target)
    policy = MeasuredDiscoPolicy(classified) if measures else classified
    chain = draft.drafter(config, policy, target)
    return measured(chain, policy, target, config, nodes_per_level=1) if measures else chain


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    """A tree that ends where the classifier ends a chain."""
    draft, policy = _find_parts(DiscoConfig(), target, assistant)
    return draft.drafter(wide_tree(batching), policy, target)


@register("disco", _make_drafter, _make_for_auto)
@dataclass(frozen=True)
class DiscoConfig(DraftConfig):
    """Options of a chain that a classifier ends; those of `DraftConfig` with other defaults.

    `assistant=` is the adapter, which names its draft model; or, where `adapter` is given here, a
    draft model.

    Attributes:
        max_draft_tokens: None is the adapter's calibrated value.
    """

    adapter_methods = (METHOD,)
    sizes = ("max_draft_tokens", "acceptance_threshold")

    length_policy: str | None = "disco"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length_policy != "disco":
            raise OptionError(
                f"DiscoConfig(length_policy={self.length_policy!r}): it is 'disco' here; for "
                "another one use DraftConfig"
            )


_from_hub = functools.cache(functools.partial(load_adapter, method=METHOD))


def read_adapter(name: str) -> SpecAdapter:
    """The DISCO adapter in a folder or on the Hub (`AssistantError` if there is none)."""
    # A folder may be calibrated again between two calls; the Hub is asked once.
    return load_adapter(name, METHOD) if Path(name).is_dir() else _from_hub(name)


def find_draft_model(adapter: SpecAdapter, target: PreTrainedModel) -> PreTrainedModel:
    """The draft model that an adapter names in its option `draft`, checked against the target."""
    named: Any = adapter.options.get("draft")
    if isinstance(named, dict) and set(named) == {"truncated"}:
        what = f"{adapter.folder or 'the adapter'}: draft"
        depth = whole_number(what, named, "truncated", 1, adapter.base.num_layers - 1)
        draft = cached_per_model(
            target, ("truncated", depth), lambda: truncated_draft(target, depth)
        )
        return resolve_draft_model(METHOD, draft, target)
    if isinstance(named, str):
        return resolve_draft_model(METHOD, beside(adapter, named), target)
    raise AssistantError(
        f"adapter {str(adapter.folder)!r} names no draft model (draft={named!r}); pass it: "
        "spec_strategy=DiscoConfig(adapter=<this adapter>), assistant=<draft model>"
    )


def _adapter_of(assistant: object) -> SpecAdapter:
    if isinstance(assistant, SpecAdapter) and assistant.method == METHOD:
        return assistant
    if not isinstance(assistant, (str, os.PathLike)):
        raise AssistantError(
            f"spec_strategy='disco' with an assistant of type {type(assistant).__name__} lacks the "
            "classifier: pass assistant=<DISCO adapter>, or spec_strategy=DiscoConfig(adapter="
            "<DISCO adapter>) and assistant=<draft model>"
        )
    return read_adapter(os.fspath(assistant))
