"""Drafts that are accepted with a chosen probability: the system's own cost without a drafter.

Each draft is a chain of what plain greedy `generate()` says next, every token of it wrong with
probability 1 - p. What is measured is everything but the drafting: forwards over so many nodes,
verification, keys and values. The output stays the target's own. Speeds are an upper bound for a
drafter of this acceptance, whose own time comes on top; every report has to say so.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from hf_spec.bench.contenders import Contender
from hf_spec.bench.oracle import knowing
from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.state import GenerationState
from hf_spec.execution.tree import DraftTree


class SyntheticDrafter(Drafter):
    """Chains of the right tokens, some of them spoiled.

    Args:
        answers: per row the tokens that the target generates, prompt excluded.
        acceptance: p, probability that a token is left as it is.
        length: tokens of a chain.
        vocab_size: of the target.
    """

    def __init__(
        self, answers: Sequence[Sequence[int]], acceptance: float, length: int, vocab_size: int
    ):
        self.answers = answers
        self.acceptance = acceptance
        self.length = length
        self.vocab_size = vocab_size

    def start(self, state: GenerationState) -> None:
        """Spoil the same places of the same answers in every repetition."""
        self._random = random.Random(str(self.answers))  # noqa: S311 - no secret

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """The next tokens of every unfinished row."""
        drafts = {}
        for row, limit in limits.items():
            begin = state.generated[row]
            end = begin + min(self.length, limit)
            chain = [self._spoiled(token) for token in self.answers[row][begin:end]]
            drafts[row] = [state.tokens[row][-1], *chain], list(range(-1, len(chain)))
        return DraftTree.from_drafts(drafts, state.num_rows)

    def _spoiled(self, token: int) -> int:
        right = self._random.random() < self.acceptance
        return token if right else (token + 1) % self.vocab_size


def synthetic(model: Any, acceptance: float, length: int) -> Contender:
    """Chains of `length` tokens, each accepted behind accepted ones with probability `acceptance`.

    Args:
        model: the target.
        acceptance: between 0 and 1.
        length: at least 1.
    """
    vocab_size = model.config.get_text_config().vocab_size

    def drafter(answers: list[list[int]]) -> Drafter:
        return SyntheticDrafter(answers, acceptance, length, vocab_size)

    name = f"synthetic, {length} tokens, acceptance {acceptance:g}"
    return knowing(model, drafter, name)
