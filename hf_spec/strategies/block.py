"""DFlash and DSpark: a head that others have published drafts a whole block in one pass.

What a block is made of: `hf_spec.models.block_head`. By default the draft is a chain, as the heads
were trained for; a tree of the likeliest paths, or of ranks, takes nothing but time of the target.
With a Markov head the lists follow the tokens before; without one they are the same on every path.

A chain is drawn at random where the target samples, and judged by residual rejection; trees take
the likeliest tokens, and are judged by node draw.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.drafting.length_policy import HEAD
from hf_spec.errors import AssistantError, OptionError
from hf_spec.models.block_head import BlockHead
from hf_spec.models.block_reading import DFLASH, DSPARK, checked_layers
from hf_spec.models.block_runner import BlockRunner
from hf_spec.strategies.assistants import resolve_published
from hf_spec.strategies.heads import ProposalConfig, make_proposal_drafter
from hf_spec.strategies.registry import register


class _Reading:
    """A head as a config reads it where the head's own config leaves something open."""

    def __init__(self, head: BlockHead, layers: tuple[int, ...], embedding_scale: float):
        self.head = head
        self.hidden_layers = layers
        self.num_levels = head.shape.num_levels
        self.timing_key = id(head)
        self.embedding_scale = embedding_scale

    def runner(self, num_rows: int) -> BlockRunner:
        """See `ProposalHead`."""
        return BlockRunner(self.head, num_rows, self.embedding_scale)

    def num_forwards(self, depth: int) -> int:
        """One pass, however many of its places are drafted."""
        return 1


def _make(config: BlockConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head: BlockHead = resolve_published(config.strategy, assistant, target, (DFLASH, DSPARK))
    layers, scale = head.shape.hidden_layers, config.embedding_scale
    if config.aux_layers is not None:
        text = target.config.get_text_config()
        layers = checked_layers(
            f"BlockConfig(aux_layers={list(config.aux_layers)})",
            tuple(config.aux_layers),
            head.fc.in_features,
            text,
        )
    if layers is None:
        raise AssistantError(
            "the head's config has no target_layer_ids, which say what it reads of the target; "
            "pass BlockConfig(aux_layers=[...]), the indices of the hidden states it was trained on"
        )
    if config.length_policy == HEAD and head.confidence is None:
        raise AssistantError(
            f"length_policy={HEAD!r}: this head has no confidence head; choose 'confidence'"
        )
    scale = head.shape.embedding_scale if scale is None else scale
    return make_proposal_drafter(config, _Reading(head, layers, scale), target)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there, and nothing is drawn at random.
    wide = BlockConfig(children=3, length_policy="static", sample_drafts=False, batching=batching)
    return _make(wide, target, assistant)


@register("block", _make, _make_for_auto)
@dataclass(frozen=True)
class BlockConfig(ProposalConfig):
    """Options of DFlash and DSpark heads; `length_policy="head"` asks DSpark's confidence head.

    Attributes:
        children: most children per node; 1 is a chain.
        sample_drafts: draw the draft at random when the target samples.
        aux_layers: indices of the target's hidden states that the head reads, if its config does
            not say, or says it wrongly; 0 is the embedding.
        embedding_scale: factor of the target's embedding, whose raw rows the head reads; None is
            the config's, or 1. For Gemma, readings differ: 1, or the root of the hidden size.
    """

    has_confidence_head = True

    children: int = 1
    sample_drafts: bool = True
    aux_layers: list[int] | None = None
    embedding_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("embedding_scale", 0)
        layers = self.aux_layers
        if layers is not None and not (
            isinstance(layers, (list, tuple)) and all(type(i) is int for i in layers)
        ):
            raise OptionError(f"aux_layers={layers!r:.60} must be a list of indices such as [2, 4]")
