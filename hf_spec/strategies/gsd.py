"""Graph-structured drafting: a drafted tree whose repeated runs of tokens are drafted once (GSD).

The drafter of `draft` and `tree` with merging on. The graph is unmerged into the most probable
paths before the target sees it, so an accepted path may run through a merge edge; the draft model
then recomputes its keys and values behind the first merged node only (Gong et al. 2024, arXiv
2407.16207, sections 3 and 4). When the target samples, node draw is exact here. The paper's own
sampling rule changes the distribution; it is there as `GsdConfig(lossy=True)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.verification import Walk
from hf_spec.drafting.longest_path import LongestPath
from hf_spec.errors import OptionError
from hf_spec.execution.tree import DraftTree
from hf_spec.strategies.base import register
from hf_spec.strategies.draft_model import DraftModelDrafter, TreeConfig, TreeShape, make_drafter


def _make_drafter(config: GsdConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    return make_drafter(config, target, assistant, GsdDrafter)


@register("gsd", _make_drafter)
@dataclass(frozen=True)
class GsdConfig(TreeConfig):
    """Options of a drafted graph; those of `TreeConfig` with the paper's values, and three more.

    Attributes:
        expanded_per_level: more than a level can have, as in the paper: every node that is not a
            leaf by `min_probability` is expanded.
        min_sibling_ratio: as in `TreeConfig`; children far behind their best sibling are dropped,
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
        if self.merge_length is not None:
            self.check("merge_length", 0)
        self.check("max_draft_nodes", 1)
        if not isinstance(self.lossy, bool):
            raise OptionError(f"lossy={self.lossy!r} must be True or False")
        if self.sample_drafts:
            raise OptionError(
                "GsdConfig(sample_drafts=True): merged nodes are drafts of several paths at once, "
                "which a random draft cannot be; leave it False (sampling stays exact)"
            )

    @property
    def shape(self) -> TreeShape:
        """The configured graph."""
        return replace(
            super().shape, merge_length=self.merge_length, max_draft_nodes=self.max_draft_nodes
        )


class GsdDrafter(DraftModelDrafter):
    """Grows a graph per row, and brings the paper's sampling rule where `lossy` asks for it."""

    def start(self, state: GenerationState) -> None:
        """See `DraftModelDrafter`."""
        super().start(state)
        lossy = isinstance(self.config, GsdConfig) and self.config.lossy
        self.rule = IndependentAcceptance if lossy and state.do_sample else None


class IndependentAcceptance(LongestPath):
    """The paper's sampling rule: every node is accepted or not, apart from all others. Lossy.

    A child x with draft probability q is accepted with probability min(1, p / q), p being the
    target's. Of the paths that are accepted whole the longest is kept (the most probable one if
    several are), and a bonus token drawn from the target's distribution follows it. Nothing makes
    up for what that prefers: a refused token may come back as the bonus, a sibling has a chance of
    its own, and longer paths win. So tokens that the draft model proposes come more often than the
    target would say them (Gong et al. 2024, arXiv 2407.16207, verification when sampling).
    """

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        """Found level by level."""
        assert tree.node_probs is not None, "drafted graphs carry the probability of each node"
        draft_probs = tree.node_probs.tolist()
        level = [(row, tree.row_start[row]) for row in walk.state.unfinished]
        paths: dict[int, list[int]] = {root: [] for _, root in level}
        while level := [(row, node) for row, node in level if tree.children[node]]:
            rows, nodes = [row for row, _ in level], [node for _, node in level]
            target_probs = walk.look(rows, nodes, [paths[n] for n in nodes]).softmax(dim=-1)
            level = []
            for row, node, probs in zip(rows, nodes, target_probs, strict=True):
                for child in tree.children[node]:
                    token = tree.tokens[child]
                    if float(torch.rand(())) * draft_probs[child] < float(probs[token]):
                        paths[child] = [*paths[node], token]
                        level.append((row, child))
        return set(paths)
