"""Options of drafts from EAGLE heads (see `hf_spec.methods.eagle`).

`assistant=` takes the folder or Hub id of a published head as it is. A tree depends only on
committed tokens and features, so it is verified by node draw. A chain is sampled when the target
samples, and verified by residual rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.cost_model.adaptive_length_drafter import with_policy
from hf_spec.drafting.level_drafter import BeamConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.eagle.head import FAMILIES, STRATEGY, EagleHead
from hf_spec.methods.eagle.spec import EMBEDDINGS, OVERRIDES
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.published_weights import check_aux_layers, config_overrides
from hf_spec.methods.registry import register


def _make(config: EagleConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    overrides = config_overrides(config, OVERRIDES)
    head: EagleHead = resolve_published(STRATEGY, assistant, target, FAMILIES, overrides)
    return with_policy(config, target, partial(PairDrafter, head=head), config.shape.children)


@register(STRATEGY, _make)
@dataclass(frozen=True)
class EagleConfig(BeamConfig):
    """Options of an EAGLE head's drafts, a dynamic tree by default.

    `aux_layers` to `norm_output` override the head's config where it is silent or wrong; `hf-spec
    check-head` finds the values that fit.

    Attributes:
        aux_layers: indices into the target's `hidden_states` that make a feature.
        rope_theta: base of the head's rotary positions.
        embedding: "target" for the target's table; "own" for the one in the head's files; "scaled"
            for the target's times the square root of its width, as in Gemma's layers.
        norm_before_residual: use the normed feature as the residual of the attention.
        norm_output: pass the normed output to the next step.
        draft_window: most recent tokens that the head attends to, drafted ones included. For heads
            that were trained on short contexts and draft worse in longer ones. None for all.
    """

    usual = MappingProxyType({"max_draft_tokens": 5, "max_nodes": 24})
    longest = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 32})

    tree: str = "dynamic"
    width: int = 8
    aux_layers: Any = None
    rope_theta: float | None = None
    embedding: str | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    draft_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rope_theta", 1)
        self.check("draft_window", 1)
        if self.embedding not in (None, *EMBEDDINGS):
            raise OptionError(
                f"embedding={self.embedding!r} is unknown; {choices(self.embedding, EMBEDDINGS)}"
            )
        self.check_flags("norm_before_residual", "norm_output")
        check_aux_layers(self.aux_layers)
