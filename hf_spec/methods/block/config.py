"""DFlash and DSpark: a head that others have published drafts a whole block in one pass.

What a block is made of: `hf_spec.methods.block.head`. By default the draft is a chain, as the heads
were trained for; a tree of the likeliest paths, or of ranks, takes nothing but time of the target.
With a Markov head the lists follow the tokens before; without one they are the same on every path.

A chain is drawn at random where the target samples, and judged by residual rejection; trees take
the likeliest tokens, and are judged by node draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.drafting.length_policy import HEAD
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import DFLASH, DSPARK
from hf_spec.methods.block.runner import BlockRunner
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.medusa.config import ProposalConfig, make_proposal_drafter
from hf_spec.methods.registry import register


def _make(config: BlockConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    kinds = (DFLASH, DSPARK)
    head: BlockHead = resolve_published(config.strategy, assistant, target, kinds, config.overrides)
    if config.length_policy == HEAD and head.confidence is None:
        raise AssistantError(
            f"length_policy={HEAD!r}: this head has no confidence head; choose 'confidence'"
        )

    def make_runner(state: GenerationState) -> BlockRunner:
        return BlockRunner(head, state.num_rows, state.expected_length)

    return make_proposal_drafter(config, head, make_runner, target)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there, and nothing is drawn at random.
    wide = BlockConfig(
        children=3, max_nodes=None, length_policy="static", sample_drafts=False, batching=batching
    )
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
        from_anchor: whether the first output drafts, too, and each one the token after its place,
            as in DSpark; None is what the config's class says. `hf-spec check-head` finds it out.
        embedding_scale: factor of the target's embedding, whose raw rows the head reads; None is
            the config's, or 1. For Gemma, readings differ: 1, or the root of the hidden size.
    """

    has_confidence_head = True

    children: int = 1
    sample_drafts: bool = True
    aux_layers: list[int] | None = None
    from_anchor: bool | None = None
    embedding_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("embedding_scale", 0)
        self.check_flags("from_anchor")
        layers = self.aux_layers
        if layers is not None and not (
            isinstance(layers, (list, tuple)) and all(type(i) is int for i in layers)
        ):
            raise OptionError(f"aux_layers={layers!r:.60} must be a list of indices such as [2, 4]")

    @property
    def overrides(self) -> tuple[tuple[str, Any], ...]:
        """What is said of the head against its config."""
        layers = None if self.aux_layers is None else tuple(self.aux_layers)
        given = {
            "aux_layers": layers,
            "from_anchor": self.from_anchor,
            "embedding_scale": self.embedding_scale,
        }
        return tuple((name, value) for name, value in given.items() if value is not None)
