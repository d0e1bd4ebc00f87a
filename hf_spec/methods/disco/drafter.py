"""Length policies and config of `disco`; for the method see `hf_spec.methods.disco`."""

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
from hf_spec.drafting.config import AssistantConfig
from hf_spec.drafting.cost_model.adaptive_length_drafter import adapt_length, can_measure
from hf_spec.drafting.length_policy import (
    DraftedToken,
    LengthPolicy,
    MeasuredPolicy,
    register_policy,
)
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.disco.classifier import METHOD, DiscoClassifier, draft_features
from hf_spec.methods.draft_model.loading import (
    AssistantWithTokenizers,
    DraftConfig,
    LoadedDraft,
    find_draft,
    resolve_draft_model,
    tree_for_auto,
)
from hf_spec.methods.draft_model.truncated import PREFIX
from hf_spec.methods.loading import find_assistant
from hf_spec.methods.registry import register

# Largest draft length that an adapter may contain.
LONGEST = 1024


@dataclass
class DiscoPolicy(LengthPolicy):
    """Stop after a token whose predicted acceptance probability is below `threshold`.

    In the paper, `threshold` is tau and `max_draft_tokens` is SL_max. `is_calibrated` is True if
    both were chosen by measured speed.
    """

    threshold: float
    classifier: DiscoClassifier
    is_calibrated: bool = False

    @torch.no_grad()
    def score(self, draft_probs: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the (M,) predicted acceptance probabilities."""
        (on_device,) = send([torch.tensor(positions)], draft_probs.device)
        classifier = self.classifier.to(draft_probs.device)
        return classifier(draft_features(draft_probs, on_device)).sigmoid()

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Compare acceptance probabilities with the threshold."""
        return [token.score >= self.threshold for token in newest]


class MeasuredDiscoPolicy(MeasuredPolicy):
    """Stop where another level costs more than its predicted acceptance probability is worth.

    The classifier estimates the reach of the next level; its threshold is not used.
    """

    def __init__(self, disco: DiscoPolicy):
        super().__init__(disco.max_draft_tokens)
        self.score = disco.score  # type: ignore[method-assign]

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """See `MeasuredPolicy`; the reach is the product of the acceptance probabilities."""
        tokens = []
        for token in newest:
            reach = self._reach[token.row][-1] if self._reach[token.row] else 1.0
            tokens.append(replace(token, reach=reach * token.score))
        return super().goes_on(tokens)


def make_policy(config: DraftConfig, target: PreTrainedModel) -> DiscoPolicy:
    """Return the policy for `length_policy="disco"`, from the adapter that the config names."""
    if config.adapter is None:
        raise OptionError(
            "length_policy='disco' needs a trained classifier: adapter=<folder or Hub id>, from "
            "`hf-spec train disco`"
        )
    return _load_policy(read_adapter(config.adapter), config, target)


def _load_policy(adapter: SpecAdapter, config: DraftConfig, target: PreTrainedModel) -> DiscoPolicy:
    adapter.base.check(target)
    longest, threshold = config.max_draft_tokens, config.acceptance_threshold
    if longest is None:
        longest = _calibrated(adapter, "max_draft_tokens", 1, LONGEST, int)
    if threshold is None:
        threshold = _calibrated(adapter, "threshold", 0, 1, float, int)
    classifier = DiscoClassifier.from_adapter(adapter)
    return DiscoPolicy(longest, threshold, classifier, "calibration" in adapter.options)


def _calibrated(adapter: SpecAdapter, name: str, low: float, high: float, *kinds: type) -> Any:
    value: Any = adapter.options.get(name)
    if type(value) not in kinds or not low <= value <= high:
        raise AssistantError(
            f"{adapter.folder or 'the adapter'} has {name}={value!r}; calibrate it: "
            "hf-spec calibrate disco"
        )
    return value


register_policy("disco", make_policy)


def _load_parts(
    config: DiscoConfig, target: PreTrainedModel, assistant: object
) -> tuple[LoadedDraft, DiscoPolicy]:
    if config.adapter is not None:
        return find_draft(METHOD, assistant, target), make_policy(config, target)
    if isinstance(assistant, AssistantWithTokenizers):
        raise AssistantError(
            "assistant_tokenizer= is for a draft model; pass the classifier separately: "
            "spec_strategy=DiscoConfig(adapter=<DISCO adapter>), assistant=<draft model>"
        )
    adapter = _as_adapter(assistant)
    policy = _load_policy(adapter, config, target)
    return LoadedDraft(find_draft_model(adapter, target)), policy


def _make_drafter(config: DiscoConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    draft, disco = _load_parts(config, target, assistant)
    is_open = config.leaves_sizes_open and not disco.is_calibrated
    measures = is_open and can_measure(target)
    policy = MeasuredDiscoPolicy(disco) if measures else disco
    chain = draft.drafter(config, policy, target)
    return adapt_length(chain, target, config, nodes_per_level=1) if measures else chain


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    draft, policy = _load_parts(DiscoConfig(), target, assistant)
    return draft.drafter(tree_for_auto(auto).resolve(measures=True), policy, target)


@register("disco", _make_drafter, _make_for_auto)
@dataclass(frozen=True)
class DiscoConfig(DraftConfig):
    """Options of `disco`: those of `DraftConfig` with other defaults.

    `assistant=` is the adapter, which names its draft model; with `adapter=` in the config it is
    the draft model. With neither `max_draft_tokens` nor `acceptance_threshold`, and an adapter that
    was never calibrated, the cost model replaces the threshold.

    Attributes:
        max_draft_tokens: SL_max. Default: the adapter's value.
        acceptance_threshold: tau. Default: the adapter's value.
    """

    adapter_methods = (METHOD,)
    sizes = ("max_draft_tokens", "acceptance_threshold")

    length_policy: str | None = "disco"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length_policy != "disco":
            raise OptionError(
                f"DiscoConfig(length_policy={self.length_policy!r}) is unsupported; use "
                "DraftConfig for policies other than 'disco'"
            )


_from_hub = functools.cache(functools.partial(load_adapter, method=METHOD))


def read_adapter(name: str) -> SpecAdapter:
    """Return the DISCO adapter in a folder or on the Hub; raise `AssistantError` if it fails."""
    # A folder may be recalibrated between two calls, so only Hub adapters are cached.
    return load_adapter(name, METHOD) if Path(name).is_dir() else _from_hub(name)


def find_draft_model(adapter: SpecAdapter, target: PreTrainedModel) -> PreTrainedModel:
    """Return the draft model that the adapter's option `draft` names, checked against `target`."""
    named: Any = adapter.options.get("draft")
    if isinstance(named, dict) and set(named) == {"truncated"}:
        what = f"{adapter.folder or 'the adapter'}: draft"
        depth = whole_number(what, named, "truncated", 1, adapter.base.num_layers - 1)
        draft = find_assistant(f"{PREFIX}{depth}", target, None)
        return resolve_draft_model(METHOD, draft, target)
    if isinstance(named, str):
        return resolve_draft_model(METHOD, beside(adapter, named), target)
    raise AssistantError(
        f"adapter {str(adapter.folder)!r} names no draft model (draft={named!r}); pass it: "
        "spec_strategy=DiscoConfig(adapter=<this adapter>), assistant=<draft model>"
    )


def _as_adapter(assistant: object) -> SpecAdapter:
    if isinstance(assistant, SpecAdapter) and assistant.method == METHOD:
        return assistant
    if not isinstance(assistant, (str, os.PathLike)):
        raise AssistantError(
            f"spec_strategy='disco' with an assistant of type {type(assistant).__name__} lacks the "
            "classifier: pass assistant=<DISCO adapter>, or spec_strategy=DiscoConfig(adapter="
            "<DISCO adapter>) and assistant=<draft model>"
        )
    return read_adapter(os.fspath(assistant))
