"""Masks of a segment of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_spec.engine.forward.attention_span import Segment


def segment() -> Segment:
    """Return a segment of two siblings after three committed tokens; neither sees the other."""
    visible = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], dtype=torch.bool)
    position = torch.tensor([3, 3])
    return Segment(
        slot=0,
        start=0,
        end=2,
        num_keys=5,
        position=position,
        last_position=3,
        tail_position=torch.tensor([2, 3, 3]),
        seen=visible[:, 2:],
        prefix=2,
    )


def test_the_prefix_is_seen_by_all() -> None:
    one = segment()
    assert one.visible is not None
    assert one.visible.tolist() == [
        [True, True, True, True, False],
        [True, True, True, False, True],
    ]
    assert one.key_position.tolist() == [0, 1, 2, 3, 3]
    assert replace(one, first_position=4).key_position.tolist() == [4, 5, 2, 3, 3]
    assert replace(one, seen=None).visible is None


def test_siblings_are_hidden_and_heads_folded_into_rows() -> None:
    mask = segment().mask(None, 2, torch.zeros(1))
    assert mask is not None
    assert mask.isinf().tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]] * 2


def test_a_window_counts_positions() -> None:
    mask = segment().mask(2, 1, torch.zeros(1))
    assert mask is not None
    assert mask.isinf().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 1, 0]]


def test_masks_are_computed_once_per_kind_of_layer() -> None:
    like = torch.zeros(1)
    one = segment()
    assert one.mask(None, 2, like) is one.mask(None, 2, like)
    assert one.mask(3, 2, like) is one.mask(3, 2, like)
    assert one.mask(2, 2, like) is not one.mask(None, 2, like)


def test_a_chunk_begins_anew_at_its_multiples() -> None:
    like = torch.zeros(1)
    one = segment()
    mask = one.mask(None, 1, like, chunk=3)
    assert mask is not None
    assert mask.isinf().tolist() == [[1, 1, 1, 0, 1], [1, 1, 1, 1, 0]]
    mask = one.mask(None, 1, like, chunk=2)
    assert mask is not None
    assert mask.isinf().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 1, 0]]
    assert one.mask(None, 1, like, chunk=4) is not mask
