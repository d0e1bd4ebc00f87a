"""EAGLE: a published head of one layer drafts a tree from the target's own features.

Many repositories of the Hub hold heads of EAGLE-3, 3.1, P-EAGLE and EAGLE-1/2 for popular models;
`assistant=` takes their folder or id as it is (see `hf_spec.methods.eagle.head`). The draft is the
dynamic tree of EAGLE-2 or a chain, grown by `hf_spec.drafting.level_drafter`: the beam of the w
likeliest paths is drafted on, and of all that was drafted the likeliest nodes are sent.

A tree depends on committed tokens and features alone, so it is judged by node draw; a chain is
drawn at random where the target samples, and judged by residual rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.cost_model.cost_model_drafter import with_policy
from hf_spec.drafting.level_drafter import BeamConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.methods.eagle.head import FAMILIES, STRATEGY, EagleHead
from hf_spec.methods.eagle.spec import EMBEDDINGS
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.registry import register

READING = ("aux_layers", "rope_theta", "embedding", "norm_before_residual", "norm_output")


def _make(config: EagleConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head: EagleHead = resolve_published(STRATEGY, assistant, target, FAMILIES, config.reading)
    return with_policy(config, target, partial(PairDrafter, head=head), config.shape.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there.
    return _make(
        EagleConfig(max_draft_tokens=5, max_nodes=24, batching=batching), target, assistant
    )


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class EagleConfig(BeamConfig):
    """Options of an EAGLE head's drafts, a dynamic tree by default.

    The last five say how to read a head whose config is silent or wrong about it; `hf-spec
    check-head` finds out which reading fits.

    Attributes:
        aux_layers: indices into the target's `hidden_states` that make a feature.
        rope_theta: base of the head's rotary positions.
        embedding: "target", the target's table; "own", the one in its files; "scaled", the
            target's times the square root of its width.
        norm_before_residual: whether the residual of its attention is the normed feature.
        norm_output: whether the feature handed to its next step is normed.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rope_theta", 1)
        if self.embedding not in (None, *EMBEDDINGS):
            raise OptionError(
                f"embedding={self.embedding!r} is none; {choices(self.embedding, EMBEDDINGS)}"
            )
        self.check_flags("norm_before_residual", "norm_output")
        layers = self.aux_layers
        whole = isinstance(layers, (list, tuple)) and all(type(one) is int for one in layers)
        if layers is not None and not (whole and layers):
            raise OptionError(f"aux_layers={layers!r} must be a list of indices, [2, 16, 29]")

    @property
    def reading(self) -> tuple[tuple[str, Any], ...]:
        """What is said of the head against its config."""
        given = {name: getattr(self, name) for name in READING}
        if self.aux_layers is not None:
            given["aux_layers"] = tuple(self.aux_layers)
        return tuple((name, value) for name, value in given.items() if value is not None)
