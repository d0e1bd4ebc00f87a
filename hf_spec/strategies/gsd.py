"""Graph-structured drafting: a drafted tree whose repeated runs of tokens are drafted once (GSD).

The drafter of `draft` and `tree` with merging on. The graph is unmerged into the most probable
paths before the target sees it, so an accepted path may run through a merge edge; the draft model
then recomputes its keys and values behind the first merged node only (Gong et al. 2024, arXiv
2407.16207, sections 3 and 4). The paper's sampling rule, which accepts each node with probability
min(1, p / q) on its own, changes the distribution and is not used: node draw is exact here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_spec.errors import OptionError
from hf_spec.strategies.base import register
from hf_spec.strategies.draft_model import TreeConfig, TreeShape, make_drafter


@register("gsd", make_drafter)
@dataclass(frozen=True)
class GsdConfig(TreeConfig):
    """Options of a drafted graph; those of `TreeConfig` with the paper's values, and one more.

    Attributes:
        merge_length: tokens before a node that must agree for a merge, 0 to merge equal tokens
            wherever they stand, None to merge nothing. The paper's Table 5 calls it tau; counted as
            in its text, tau is one more.
    """

    max_draft_tokens: int = 10
    children: int = 4
    min_probability: float = 0.2
    min_sibling_ratio: float = 0.3
    merge_length: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_length is not None:
            self.check("merge_length", 0)
        if self.sample_drafts:
            raise OptionError(
                "GsdConfig(sample_drafts=True): merged nodes are drafts of several paths at once, "
                "which a random draft cannot be; leave it False (sampling stays exact)"
            )

    @property
    def shape(self) -> TreeShape:
        """The configured graph."""
        return replace(super().shape, merge_length=self.merge_length)
