"""Drafter for tests that has the expected output and drafts partly correct chains or trees."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hf_spec import Drafter, DraftTree, GenerationState
from tests.tiny_models import VOCAB

# Maximum depth of a draft.
DEPTH = 6


class PartlyRight(Drafter):
    """Drafter of chains or trees that are right for a random number of tokens and then wrong.

    One draft in ten is empty.
    """

    def __init__(self, answers: Sequence[Sequence[int]], branches: bool):
        self.answers = answers
        self.branches = branches
        self.dice = random.Random(0)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        drafts = {row: self._grow(state, row, limit) for row, limit in limits.items()}
        return DraftTree.from_drafts(drafts, state.num_rows)

    def _grow(self, state: GenerationState, row: int, limit: int) -> tuple[list[int], list[int]]:
        done = state.generated[row]
        true = self.answers[row][done : done + min(limit, DEPTH)]
        tokens, parents, last = [state.tokens[row][-1]], [-1], 0
        if self.dice.random() < 0.1:
            return tokens, parents
        right = self.dice.randint(0, DEPTH)
        for level, token in enumerate(true):
            if self.branches and self.dice.random() < 0.5:
                tokens.append((token + 1) % VOCAB)
                parents.append(last)
                # Child of the wrong sibling, with the token that is right after the right sibling.
                tokens += true[level + 1 : level + 2]
                parents += [len(parents) - 1] * (len(tokens) - len(parents))
            tokens.append(token if level < right else (token + 3) % VOCAB)
            parents.append(last)
            last = len(tokens) - 1
        return tokens, parents
