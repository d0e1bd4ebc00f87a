"""EAGLE: a published head of one layer drafts a tree from the target's own features.

Many repositories of the Hub hold heads of EAGLE-3, 3.1, P-EAGLE and EAGLE-1/2 for popular models;
`assistant=` takes their folder or id as it is (see `hf_spec.models.eagle_head`). The draft is the
dynamic tree of EAGLE-2 or a chain, grown by `hf_spec.drafting.level_drafter`: the beam of the w
likeliest paths is drafted on, and of all that was drafted the likeliest nodes are sent.

A tree depends on committed tokens and features alone, so it is judged by node draw; a chain is
drawn at random where the target samples, and judged by residual rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.drafting.length_policy import MEASURED, make_policy
from hf_spec.drafting.level_drafter import LevelConfig, TreeShape
from hf_spec.drafting.measured import measured, resolve
from hf_spec.drafting.sources import NODES_PER_LEVEL
from hf_spec.errors import OptionError, choices
from hf_spec.models.eagle_head import FAMILIES, STRATEGY, EagleHead
from hf_spec.models.eagle_spec import EMBEDDINGS
from hf_spec.models.pair_drafter import PairDrafter
from hf_spec.strategies.assistants import resolve_published
from hf_spec.strategies.registry import register

TREES = ("dynamic", "chain")
READING = ("aux_layers", "rope_theta", "embedding", "norm_before_residual", "norm_output")


def _make(config: EagleConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head: EagleHead = resolve_published(STRATEGY, assistant, target, FAMILIES, config.reading)
    config = resolve(config, target)
    policy = make_policy(config, target)
    drafter = PairDrafter(config, head, policy)
    if config.length_policy != MEASURED:
        return drafter
    return measured(drafter, policy, target, config, min(config.shape.children, NODES_PER_LEVEL))


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there.
    return _make(
        EagleConfig(max_draft_tokens=5, max_nodes=24, batching=batching), target, assistant
    )


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class EagleConfig(LevelConfig):
    """Options of an EAGLE head's drafts; `max_draft_tokens` is the depth of a tree.

    The last five say how to read a head whose config is silent or wrong about it; `hf-spec
    check-head` finds out which reading fits.

    Attributes:
        tree: "dynamic", EAGLE-2's, or "chain".
        width: of a dynamic tree: children per node, and nodes per level that are drafted on.
        max_nodes: most nodes sent to the target, root excluded, the likeliest paths first; None is
            as many as are worth their time, and 24 where the depth is given or another policy.
        sample_drafts: draw the draft at random when the target samples; None for chains alone.
        aux_layers: indices into the target's `hidden_states` that make a feature.
        rope_theta: base of the head's rotary positions.
        embedding: "target", the target's table; "own", the one in its files; "scaled", the
            target's times the square root of its width.
        norm_before_residual: whether the residual of its attention is the normed feature.
        norm_output: whether the feature handed to its next step is normed.
    """

    sizes = ("max_draft_tokens", "max_nodes")
    usual = MappingProxyType({"max_draft_tokens": 5, "max_nodes": 24})
    longest = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 32})

    sample_drafts: bool | None = None  # type: ignore[assignment]
    tree: str = "dynamic"
    width: int = 8
    max_nodes: int | None = None
    aux_layers: Any = None
    rope_theta: float | None = None
    embedding: str | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise OptionError(f"tree={self.tree!r} is none; {choices(self.tree, TREES)}")
        if self.sample_drafts is None:
            object.__setattr__(self, "sample_drafts", self.tree == "chain")
        super().__post_init__()
        self.check("width", 1)
        self.check("max_nodes", 1)
        self.check("rope_theta", 1)
        if self.embedding not in (None, *EMBEDDINGS):
            raise OptionError(
                f"embedding={self.embedding!r} is none; {choices(self.embedding, EMBEDDINGS)}"
            )
        given = [n for n in ("norm_before_residual", "norm_output") if getattr(self, n) is not None]
        self.check_flags(*given)
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

    @property
    def shape(self) -> TreeShape:
        """A chain, or a beam of `width`."""
        width = self.width if self.tree == "dynamic" else 1
        given = {} if self.max_nodes is None else {"max_nodes": self.max_nodes}
        return TreeShape(children=width, expanded_per_level=width, **given)
