"""Config of `gsd`; for the method see `hf_spec.methods.gsd`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from hf_spec.common.errors import OptionError
from hf_spec.drafting.lossy_rules import IndependentAcceptance
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.methods.draft_model.loading import TreeConfig, make_drafter
from hf_spec.methods.registry import register


@register("gsd", make_drafter)
@dataclass(frozen=True)
class GsdConfig(TreeConfig):
    """Options of `gsd`: those of `TreeConfig` with other defaults, and three more.

    The paper uses ten levels, four children, and the two thresholds and `merge_length` below for
    its largest target. Its code sends about 100 nodes, which pays on a GPU (`max_nodes=100`).

    Attributes:
        max_draft_tokens: most levels drafted; paths over merge edges may be longer.
        expanded_per_level: as in the paper larger than any level, so every node that
            `min_probability` does not make a leaf is expanded. Merging a probable token into a leaf
            makes it expandable again.
        min_sibling_ratio: children below this share of their best sibling are dropped, as in the
            released code; the formula in the paper keeps them as leaves.
        merge_length: r, the number of tokens before a node that must agree for a merge; 0 merges
            equal tokens anywhere, None merges nothing.
        max_draft_nodes: most nodes drafted in a round.
        lossy: when sampling, accept as in the paper (`IndependentAcceptance`), which changes the
            output distribution. Greedy decoding stays exact.
    """

    usual = MappingProxyType({"max_draft_tokens": 10, "max_nodes": 15})
    longest = MappingProxyType({"max_draft_tokens": 10, "max_nodes": 24})

    children: int = 4
    expanded_per_level: int = 256
    min_probability: float = 0.2
    min_sibling_ratio: float = 0.3
    merge_length: int | None = 1
    max_draft_nodes: int = 256
    lossy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("merge_length", 0)
        self.check("max_draft_nodes", 1)
        self.check_flags("lossy")
        if self.sample_drafts:
            raise OptionError(
                "GsdConfig(sample_drafts=True) is unsupported, because a merged node belongs to "
                "several paths but has one sample; leave it False (sampling stays exact)"
            )

    @property
    def sampling_rule(self) -> type[Verifier] | None:
        """The paper's rule if `lossy`, else None for the exact one."""
        return IndependentAcceptance if self.lossy else None
