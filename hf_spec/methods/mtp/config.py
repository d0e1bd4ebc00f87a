"""Drafts from the MTP module that is in the target's own files, or from one of another folder.

DeepSeek-V3, GLM-4.5, Kimi-K2, Qwen3-Next, Qwen3.5, MiMo and others are published with a layer that
predicts the token after next (see `hf_spec.methods.mtp.head`). It was trained for one token more;
here it drafts several, each from what it said before, in batches of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from transformers import PreTrainedModel

from hf_spec.drafting.cost_model.cost_model_drafter import with_policy
from hf_spec.drafting.level_drafter import BeamConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.loading import resolve_inside, resolve_published
from hf_spec.methods.mtp.head import FAMILY, STRATEGY, MtpHead, own_head
from hf_spec.methods.registry import register


def _make(config: MtpConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head = _find(target, assistant)
    return with_policy(config, target, partial(PairDrafter, head=head), config.shape.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there.
    whole = MtpConfig(max_draft_tokens=3, max_nodes=16, tree="dynamic", batching=batching)
    return _make(whole, target, assistant)


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class MtpConfig(BeamConfig):
    """Options of drafts from an MTP module.

    `assistant=` is a folder or Hub id with a module that the package speculators wrote; without it,
    the module of the files that the target was loaded from.
    """

    needs_assistant = False
    usual = MappingProxyType({"max_draft_tokens": 3, "max_nodes": 16})
    longest = MappingProxyType({"max_draft_tokens": 6, "max_nodes": 24})


def _find(target: PreTrainedModel, assistant: object) -> MtpHead:
    if assistant is not None:
        found: MtpHead = resolve_published(STRATEGY, assistant, target, (FAMILY,))
        return found
    return resolve_inside(STRATEGY, target, lambda: own_head(target))
