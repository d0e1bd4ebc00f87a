"""Options of drafts from an MTP module (see `hf_spec.methods.mtp`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from transformers import PreTrainedModel

from hf_spec.drafting.config import AssistantConfig
from hf_spec.drafting.cost_model.adaptive_length_drafter import with_policy
from hf_spec.drafting.level_drafter import BeamConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.loading import resolve_inside, resolve_published
from hf_spec.methods.mtp.head import FAMILY, STRATEGY, MtpHead, head_of_target_files
from hf_spec.methods.registry import register


def _make(config: MtpConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head: MtpHead = (
        resolve_inside(STRATEGY, target, lambda: head_of_target_files(target))
        if assistant is None or assistant == target.name_or_path
        else resolve_published(STRATEGY, assistant, target, (FAMILY,))
    )
    return with_policy(config, target, partial(PairDrafter, head=head), config.shape.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    return _make(MtpConfig(tree="dynamic", batching=auto.batching), target, assistant)


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class MtpConfig(BeamConfig):
    """Options of drafts from an MTP module.

    `assistant=` is the folder or Hub id of a module written by the package speculators. Without it,
    or with the target's own folder or id, the module in the target's own files is used.
    """

    needs_assistant = False
    usual = MappingProxyType({"max_draft_tokens": 3, "max_nodes": 16})
    longest = MappingProxyType({"max_draft_tokens": 6, "max_nodes": 24})
