"""Graph-structured drafting: a drafted tree whose repeated runs of tokens are drafted once (GSD).

The drafter of `draft` and `tree` with merging on. The graph is unmerged into the most probable
paths before the target sees it, so an accepted path may run through a merge edge; the draft model
then recomputes its keys and values after the first merged node only (Gong et al. 2024, arXiv
2407.16207, sections 3 and 4). When the target samples, node draw is exact here. The paper's own
sampling rule changes the distribution; it is there as `GsdConfig(lossy=True)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from hf_spec.common.errors import OptionError
from hf_spec.drafting.lossy_rules import IndependentAcceptance
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.methods.draft_model.config import TreeConfig, make_drafter
from hf_spec.methods.registry import register


@register("gsd", make_drafter)
@dataclass(frozen=True)
class GsdConfig(TreeConfig):
    """Options of a drafted graph; those of `TreeConfig` with other defaults, and three more.

    The paper's for its largest target are ten levels, four children, the two thresholds and
    `merge_length`; its code sends about 100 nodes, which pays on a GPU (`max_nodes=100`).

    Attributes:
        max_draft_tokens: most levels drafted; paths over merge edges may be longer.
        expanded_per_level: more than a level can have, as in the paper: every node that is not a
            leaf by `min_probability` is expanded. A leaf that a likely token is merged into is one
            no longer.
        min_sibling_ratio: as in `TreeConfig`; children far below their best sibling are dropped,
            as in the released code, where the paper's formula would keep them as leaves.
        merge_length: tokens before a node that must agree for a merge, 0 to merge equal tokens
            wherever they stand, None to merge nothing. The paper's Table 5 calls it tau; counted as
            in its text, tau is one more.
        max_draft_nodes: most nodes drafted in a round; growth stops there.
        lossy: when sampling, accept as the paper does (`IndependentAcceptance`). That changes the
            distribution of the output; greedy decoding stays exact.
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
                "GsdConfig(sample_drafts=True): merged nodes are drafts of several paths at once, "
                "which a random draft cannot be; leave it False (sampling stays exact)"
            )

    @property
    def sampling_rule(self) -> type[Verifier] | None:
        """The paper's where `lossy` asks for it."""
        return IndependentAcceptance if self.lossy else None
