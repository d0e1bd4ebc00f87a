"""Low-rank changes of linear layers, applied to chosen tokens in one thread."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from hf_spec import UnsupportedError
from hf_spec.engine.forward.low_rank_change import ChosenTokens, LowRankChange, changes_in


def gate_of(*indices: int, num_tokens: int = 6) -> torch.Tensor:
    gate = torch.zeros(num_tokens, dtype=torch.bool)
    gate[list(indices)] = True
    return gate


def changed_layer() -> tuple[nn.Linear, LowRankChange]:
    torch.manual_seed(0)
    layer = nn.Linear(8, 5)
    change = LowRankChange(torch.randn(2, 8), torch.randn(5, 2), ChosenTokens())
    layer.register_forward_hook(change)
    return layer, change


@torch.no_grad()
@pytest.mark.parametrize("chosen", [(), (0,), (2, 3, 4), (1, 4), (0, 1, 2, 3, 4, 5)])
def test_chosen_tokens_follow_the_formula_and_others_keep_their_bits(
    chosen: tuple[int, ...],
) -> None:
    layer, change = changed_layer()
    states = torch.randn(1, 6, 8)
    before, gate = layer(states), gate_of(*chosen)
    with change.tokens.chosen(gate):
        found = layer(states)
    expected = before + states @ change.down.T @ change.up.T
    torch.testing.assert_close(found[0, gate], expected[0, gate])
    assert torch.equal(found[0, ~gate], before[0, ~gate])
    assert torch.equal(layer(states), before)


def test_the_thread_that_chose_is_the_only_one_in_which_it_acts() -> None:
    layer, change = changed_layer()
    assert changes_in(layer) == [change]
    seen: list[bool] = []
    with change.tokens.chosen(gate_of(1)):
        thread = threading.Thread(target=lambda: seen.append(change.acts))
        thread.start()
        thread.join()
        seen.append(change.acts)
    seen.append(change.acts)
    assert seen == [False, True, False]


def test_a_layer_that_sees_other_tokens_is_an_error() -> None:
    layer, change = changed_layer()
    with change.tokens.chosen(gate_of(1)), pytest.raises(UnsupportedError, match="saw 5 of 6"):
        layer(torch.randn(1, 5, 8))


def test_copies_of_a_model_share_the_hook() -> None:
    layer, change = changed_layer()
    assert changes_in(copy.deepcopy(layer)) == [change]
