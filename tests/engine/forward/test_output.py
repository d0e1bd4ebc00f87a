"""Forward outputs: indices of committed tokens, and prompts that ran in chunks."""

from __future__ import annotations

import torch

from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput, default_aux_layers

TREE = DraftTree.from_rows([([8, 20, 21], [-1, 0, 0]), ([], []), ([30, 40], [-1, 0])])


def output(states: list[int], nodes: list[int], pending: dict[int, list[int]]) -> ForwardOutput:
    hidden = {2: torch.tensor(states, dtype=torch.float32)[:, None]}
    return ForwardOutput(torch.zeros(len(nodes), 7), hidden, pending, nodes)


def test_kept_are_pending_tokens_root_and_what_was_accepted() -> None:
    ran = output(list(range(7)), [2, 3, 4, 5, 6], {0: [0, 1]})
    verdict = Verdict(TREE, accepted=[[2], [], []], bonus=[1, None, 2])
    assert ran.committed_indices(verdict) == {0: [0, 1, 2, 4], 2: [5]}


def test_a_stretch_before_moves_the_places_behind_it() -> None:
    ran = output([3, 4, 5], [1, 2], {0: [0], 2: []})
    ran.put_after(output([0, 1, 2], [], {0: [0, 1, 2]}))
    assert ran.hidden[2].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert ran.nodes == [4, 5]
    assert ran.pending == {0: [0, 1, 2, 3], 2: []}


def test_without_hidden_states_nothing_moves() -> None:
    ran = ForwardOutput(torch.zeros(1, 7), {}, {0: [0]}, [1])
    ran.put_after(ForwardOutput(torch.zeros(0, 7), {}, {0: [0, 1]}))
    assert (ran.nodes, ran.pending) == ([1], {0: [0]})


def test_default_layers_of_heads() -> None:
    assert default_aux_layers(32) == (2, 16, 29)
