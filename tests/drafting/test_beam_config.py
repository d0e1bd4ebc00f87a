"""Options of chains and beams."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.drafting.beam_config import BeamConfig


def test_chains_are_drawn_at_random_and_trees_are_not() -> None:
    assert BeamConfig().draws
    assert not BeamConfig(tree="dynamic").draws
    assert BeamConfig(tree="dynamic", sample_drafts=True).draws


def test_shapes() -> None:
    assert BeamConfig().shape.children == 1
    shape = BeamConfig(tree="dynamic", width=3, max_nodes=7).shape
    assert (shape.children, shape.expanded_per_level, shape.max_nodes) == (3, 3, 7)


@pytest.mark.parametrize(
    "options", [{"tree": "wide"}, {"width": 0}, {"max_nodes": 0}, {"sample_drafts": 1}]
)
def test_what_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        BeamConfig(**options)
