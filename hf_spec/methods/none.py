"""No drafts at all: the engine alone, one token per forward.

What remains of a speed-up without speculation: batches without padding, rows that leave the batch
when they end, packed weights on a CPU. The baseline that tells these from the gain of drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.drafter import NoDrafter
from hf_spec.methods.registry import register


def _make_drafter(config: NoneConfig, target: PreTrainedModel, assistant: object) -> NoDrafter:
    # One that watches a generation, say to keep its hidden states.
    if isinstance(assistant, NoDrafter):
        return assistant
    if assistant is not None:
        raise AssistantError("spec_strategy='none' drafts nothing; leave assistant= away")
    return NoDrafter()


@register("none", _make_drafter)
@dataclass(frozen=True)
class NoneConfig(StrategyConfig):
    """No options."""
