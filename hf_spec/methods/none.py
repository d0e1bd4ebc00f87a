"""The engine without drafting: one token per forward pass.

The baseline that separates the gain of drafting from that of the engine: batches without padding,
rows that leave the batch when they end, and packed weights on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.drafter import NoDrafter
from hf_spec.methods.registry import register


def _make_drafter(config: NoneConfig, target: PreTrainedModel, assistant: object) -> NoDrafter:
    # A drafter that only records a generation, such as its hidden states.
    if isinstance(assistant, NoDrafter):
        return assistant
    if assistant is not None:
        raise AssistantError("spec_strategy='none' drafts nothing; leave out assistant=")
    return NoDrafter()


@register("none", _make_drafter)
@dataclass(frozen=True)
class NoneConfig(StrategyConfig):
    """Options of the engine without drafting: none of its own."""
