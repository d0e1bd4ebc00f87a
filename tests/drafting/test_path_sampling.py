"""The rule of the SDSAT paper, against what its definition gives on paper."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.stopping import StopRules
from hf_spec.drafting.path_sampling import PathSampling
from hf_spec.execution.tree import DraftTree, Verdict


class TestShares:
    DRAWS = 20_000

    def shares(self, tokens: list[int], parents: list[int], probs: list[list[float]]) -> Tensor:
        """(4,) how often each token comes first."""
        rows = self.DRAWS
        prompt = torch.full((rows, 1), 3)
        stop = StopRules([MaxLengthCriteria(20)], rows)
        state = GenerationState.create(prompt, torch.ones_like(prompt), stop, do_sample=True)
        tree = DraftTree.from_rows([(tokens, parents)] * rows)
        torch.manual_seed(0)
        logits = torch.tensor(probs).log().repeat(rows, 1)
        verdict: Verdict = PathSampling([], rows).verify(tree, logits, state)
        first = torch.tensor([verdict.tokens(row)[0] for row in range(rows)])
        return torch.bincount(first, minlength=4) / rows

    def test_a_child_has_a_second_chance_as_the_bonus(self) -> None:
        half = [0.5, 0.3, 0.1, 0.1]
        found = self.shares([3, 0], [-1, 0], [half, half])
        expected = torch.tensor([0.5 + 0.5 * 0.5, 0.5 * 0.3, 0.5 * 0.1, 0.5 * 0.1])
        torch.testing.assert_close(found, expected, atol=0.015, rtol=0)

    def test_a_child_has_a_chance_for_every_path_through_it(self) -> None:
        half = [0.5, 0.3, 0.1, 0.1]
        # Three leaves below token 0: missed with 0.5 ** 3. The virtual node makes no path.
        found = self.shares([3, 0, 0, 1, 2, -1], [-1, 0, 1, 1, 1, 1], [half] * 6)
        missed = 0.5**3
        expected = torch.tensor([1 - missed * 0.5, missed * 0.3, missed * 0.1, missed * 0.1])
        torch.testing.assert_close(found, expected, atol=0.015, rtol=0)
