"""Tokens of rows: padded ids, prefixes of nodes, growth."""

from __future__ import annotations

import pytest
import torch
from transformers import MaxLengthCriteria

from hf_spec.engine.decode import generation_state
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from tests.row_states import commit, make_state


def test_padding_is_left_out_of_tokens_but_not_of_frames() -> None:
    state = make_state(MaxLengthCriteria(20))
    assert state.tokens == [[5, 6], [7, 8, 9, 10]]
    commit(state, [11, 12], [13])
    assert state.prefix(0).tolist() == [0, 0, 5, 6, 11, 12]
    assert state.prefix(1).tolist() == [7, 8, 9, 10, 13]
    assert [state.padded_length(row) for row in (0, 1)] == [6, 5]
    assert [state.room(row) for row in (0, 1)] == [14, 15]
    assert state.draft_limits == {0: 13, 1: 14}
    assert state.tokens == [[5, 6, 11, 12], [7, 8, 9, 10, 13]]


def test_a_path_is_shown_behind_the_frame_and_not_kept() -> None:
    state = make_state(MaxLengthCriteria(20))
    assert state.prefix(0, [30, 31]).tolist() == [0, 0, 5, 6, 30, 31]
    assert state.prefix(0, [32]).tolist() == [0, 0, 5, 6, 32]
    assert state.prefix(0).tolist() == [0, 0, 5, 6]


def test_frames_grow_where_no_length_is_set() -> None:
    prompt = torch.tensor([[3]])
    state = GenerationState.create(prompt, torch.ones_like(prompt), StopRules([], 1))
    path = list(range(40))
    assert state.prefix(0, path).tolist() == [3, *path]
    for token in path:
        state.append(0, token)
    assert state.prefix(0).tolist() == [3, *path]


@pytest.mark.parametrize("max_length", [10**11, int(1e30)])
def test_an_astronomic_length_allocates_what_is_used(
    max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers without a limit have 1e30 as `model_max_length`."""
    monkeypatch.setattr(generation_state, "FIRST_ROOM", 3)
    state = make_state(MaxLengthCriteria(max_length))
    assert state.padded_ids.shape == (2, 8)
    assert state.draft_limits == dict.fromkeys((0, 1), max_length - 5)
    blocks = [11, 12, 13, 14, 15, 16], [17]
    commit(state, *blocks)
    assert state.prefix(0).tolist() == [0, 0, 5, 6, *blocks[0]]
    assert state.finish().sequences[1].tolist() == [7, 8, 9, 10, 17, 0, 0, 0, 0, 0]
