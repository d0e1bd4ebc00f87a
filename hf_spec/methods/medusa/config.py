"""Options of Medusa heads and MLP speculators (see `hf_spec.methods.medusa`)."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_spec.drafting.config import AssistantConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.medusa.heads import MEDUSA, MLP_SPECULATOR, NewestFeatures
from hf_spec.methods.one_pass_heads import ProposalConfig, make_proposal_drafter
from hf_spec.methods.registry import register


def _make(config: HeadsConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head = resolve_published(config.strategy, assistant, target, (MEDUSA, MLP_SPECULATOR))
    return make_proposal_drafter(
        config, head, lambda state: NewestFeatures(head, state.num_rows), target
    )


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    # `auto` chooses the nodes to send.
    config = HeadsConfig(length_policy="static", max_nodes=None, batching=auto.batching)
    return _make(config, target, assistant)


@register("heads", _make, _make_for_auto, aliases=("medusa",))
@dataclass(frozen=True)
class HeadsConfig(ProposalConfig):
    """Options of Medusa heads and MLP speculators.

    Attributes:
        children: most children per node.
    """

    children: int = 4
