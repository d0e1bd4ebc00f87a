"""Options of drafts from DFlash, DFlash 2, and DSpark heads (see `hf_spec.methods.block`).

With a Markov head or a candidate selector the distributions of a level depend on the tokens before;
without, they are the same on every path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError
from hf_spec.drafting.config import AssistantConfig
from hf_spec.drafting.length_policy import HEAD
from hf_spec.drafting.tree_growth import TreeShape
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import FAMILIES, OVERRIDES
from hf_spec.methods.block.runner import BlockRunner
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.one_pass_heads import ProposalConfig, make_proposal_drafter
from hf_spec.methods.published_weights import check_aux_layers, config_overrides
from hf_spec.methods.registry import register

# Children per node of a tree whose shape is not configured.
TREE_CHILDREN = 3


def _make(config: BlockConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    overrides = config_overrides(config, OVERRIDES)
    head: BlockHead = resolve_published(config.strategy, assistant, target, FAMILIES, overrides)
    if config.length_policy == HEAD and head.confidence is None:
        raise AssistantError(
            f"length_policy={HEAD!r}: this head has no confidence head; choose 'confidence'"
        )
    return make_proposal_drafter(
        config,
        head,
        lambda state: BlockRunner(head, state.num_rows, state.expected_length),
        target,
    )


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    # `auto` chooses the nodes to send, and needs drafts that are not sampled.
    config = BlockConfig(
        children=TREE_CHILDREN,
        max_nodes=None,
        length_policy="static",
        sample_drafts=False,
        batching=auto.batching,
    )
    return _make(config, target, assistant)


@register("block", _make, _make_for_auto, aliases=("dflash", "dspark"))
@dataclass(frozen=True)
class BlockConfig(ProposalConfig):
    """Options of block heads; `length_policy="head"` uses DSpark's confidence head.

    By default a tree of the most probable paths is drafted, as in DDTree (arXiv 2604.12989), and
    the cost model chooses how many of its nodes are sent. Where siblings do not pay, these are a
    chain.

    Attributes:
        children: most children per node; 1 is a chain. None is 3, or 1 for sampled drafts and for
            `length_policy="head"`.
        sample_drafts: sample the draft when the target samples. Default: only for chains.
        aux_layers: indices into the target's `hidden_states` that the head reads, if its config
            names none or wrong ones; 0 is the embedding.
        from_anchor: the output at the last committed token drafts, too, and each output drafts the
            token after its position, as in DSpark. None follows the config's class; `hf-spec
            check-head` finds the value that fits.
        embedding_scale: factor on the raw rows of the target's embedding. None follows the config,
            or 1. For Gemma the layouts differ: 1, or the square root of the hidden size.
        draft_window: most recent tokens that the head attends to, the block included. For heads
            that were trained on short contexts and draft worse in longer ones. None follows the
            config.
    """

    has_confidence_head = True

    children: int | None = None  # type: ignore[assignment]
    sample_drafts: bool | None = None  # type: ignore[assignment]
    aux_layers: list[int] | None = None
    from_anchor: bool | None = None
    embedding_scale: float | None = None
    draft_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("embedding_scale", 0)
        self.check("draft_window", 1)
        self.check_flags("from_anchor")
        check_aux_layers(self.aux_layers)

    @property
    def _num_children(self) -> int:
        chain = self.sample_drafts or self.length_policy == HEAD
        return self.children or (1 if chain else TREE_CHILDREN)

    @property
    def draws(self) -> bool:
        """True if drafts are drawn at random when the target samples."""
        return self._num_children == 1 if self.sample_drafts is None else self.sample_drafts

    @property
    def shape(self) -> TreeShape:
        """Shape of the configured draft."""
        return replace(super().shape, children=self._num_children)
