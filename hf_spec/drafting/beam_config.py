"""Options of drafters that grow a chain, or a tree whose likeliest paths are drafted on."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.config import AUTO
from hf_spec.drafting.level_drafter import LevelConfig
from hf_spec.drafting.tree_growth import TreeShape

TREES = ("chain", "dynamic")


@dataclass(frozen=True)
class BeamConfig(LevelConfig):
    """Options of a chain or a beam; `max_draft_tokens` is the depth of a tree.

    Attributes:
        tree: "chain", or "dynamic" for EAGLE-2's tree (see `hf_spec.drafting.level_drafter`).
        width: of a dynamic tree: children per node, and nodes per level that are drafted on.
        max_nodes: most nodes sent to the target, root excluded, the likeliest paths first; "auto",
            as many as are worth their time; None is the usual number.
        sample_drafts: draw the draft at random when the target samples; None for chains alone.
    """

    sizes = ("max_draft_tokens", "max_nodes")

    sample_drafts: bool | None = None  # type: ignore[assignment]
    tree: str = "chain"
    width: int = 4
    max_nodes: int | str | None = AUTO

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise OptionError(f"tree={self.tree!r} is none; {choices(self.tree, TREES)}")
        super().__post_init__()
        self.check("width", 1)
        self.check("max_nodes", 1)

    @property
    def draws(self) -> bool:
        """Said, or so for chains."""
        return self.tree == "chain" if self.sample_drafts is None else self.sample_drafts

    @property
    def shape(self) -> TreeShape:
        """A chain, or a beam of `width`."""
        width = self.width if self.tree == "dynamic" else 1
        most = self.max_nodes if isinstance(self.max_nodes, int) else sys.maxsize
        return TreeShape(children=width, expanded_per_level=width, max_nodes=most)
