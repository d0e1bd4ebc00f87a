"""Shared code of feature heads: proposals by level, and drafts grown from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.one_pass_drafter import FixedProposals, ProposalDrafter, Proposals
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.draft_model.drafter import TreeConfig
from tests.tiny_models import VOCAB


def test_lists_follow_rows_and_levels() -> None:
    logits = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    lists = FixedProposals(logits)
    nobody = torch.zeros(0)
    assert torch.equal(lists.after(nobody, torch.tensor([1, 0])), logits[[1, 0], 0])
    # Two children of the first node, which belongs to row 1, and one child of the second.
    assert torch.equal(lists.after(nobody, torch.tensor([0, 0, 1])), logits[[1, 1, 0], 1])
    assert torch.equal(lists.after(nobody, torch.tensor([2, 1])), logits[[0, 1], 2])


class Recorder:
    """Head that records its inputs and predicts token 10 + level."""

    hidden_layers = (2, 0, 2)
    num_levels = 3
    timing_key = "recorder"
    forwards = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.learned: list[Any] = []
        self.asked: list[Any] = []
        self.known: set[int] = set()

    def num_forwards(self, depth: int) -> int:
        return 1

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def restart(self, row: int) -> None:
        self.known.discard(row)

    def knows(self, row: int) -> bool:
        return row in self.known

    def learn(self, spans: Mapping[int, tuple[int, int]], states: Sequence[Tensor]) -> None:
        self.known |= set(spans)
        self.learned.append((dict(spans), [s[:, 0].tolist() for s in states]))

    def propose(self, roots: Mapping[int, int], depth: int) -> Proposals:
        self.asked.append((dict(roots), depth))
        logits = torch.zeros(len(roots), 3, VOCAB)
        for level in range(3):
            logits[:, level, 10 + level] = 9.0
        return FixedProposals(logits)


def begun(prompts: list[list[int]]) -> GenerationState:
    ids = torch.tensor(prompts)
    return GenerationState.create(ids, torch.ones_like(ids), StopRules([], len(prompts)))


def test_what_a_head_is_told_and_asked() -> None:
    head, state = Recorder(), begun([[5, 6, 7], [8, 9, 4]])
    config = TreeConfig(children=1, max_draft_tokens=2)
    drafter = ProposalDrafter(config, head, lambda rows: head, LengthPolicy(2))
    assert drafter.hidden_layers == (2, 0)
    with drafter.active(state):
        first = drafter.draft(state, {0: 9, 1: 9})
        assert first.tokens == [7, 4]
        # The two tokens before the root ran in this pass for row 0; for row 1 they were cached.
        hidden = {layer: torch.arange(4.0)[:, None] + 10 * layer for layer in (0, 2)}
        output = ForwardOutput(torch.empty(0), hidden, {0: [0, 1]}, [2, 3])
        drafter.observe(Verdict(first, [[], []], [30, 31]), output)
        assert head.learned == [
            ({0: (0, 3), 1: (2, 1)}, [[20, 21, 22, 23], [0, 1, 2, 3], [20, 21, 22, 23]])
        ]
        state.append(0, 30)
        state.append(1, 31)
        second = drafter.draft(state, {0: 9, 1: 1})
        assert head.asked == [({0: 30, 1: 31}, 2)]
        assert second.tokens == [30, 10, 11, 31, 10]
        drafter.restart(1)
        assert drafter.draft(state, {0: 1, 1: 9}).tokens == [30, 10, 31]
    assert head.asked[-1] == ({0: 30}, 1)


def test_a_draft_that_is_no_draft_asks_nobody() -> None:
    head, state = Recorder(), begun([[5, 6, 7]])
    drafter = ProposalDrafter(TreeConfig(), head, lambda rows: head, LengthPolicy(2))
    head.known.add(0)
    with drafter.active(state):
        tree: DraftTree = drafter.draft(state, {0: 0})
    assert tree.tokens == [7]
    assert head.asked == []
