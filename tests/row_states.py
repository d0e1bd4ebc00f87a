"""Small `GenerationState`s, commits of given tokens, criteria and streamers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.streaming import BatchStreamer
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict

PROMPT = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


class EndRowOn(StoppingCriteria):
    """Criterion that ends row r at token `ends[r]` and records its inputs."""

    def __init__(self, *ends: int):
        self.ends = torch.tensor(ends)
        self.shown: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shown.append((list(input_ids.shape), scores))
        return input_ids[:, -1] == self.ends


class EndAllOn(StoppingCriteria):
    """Criterion in the old form, which returns one bool for the whole batch."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return bool((input_ids[:, -1] == self.token).any())


class RowRecorder(BatchStreamer):
    """Streamer that records the tokens of each sequence."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.ended: list[int] = []
        super().__init__(self.add, self.ended.append)

    def add(self, row: int, tokens: list[int]) -> None:
        assert row not in self.ended
        self.rows.setdefault(row, []).extend(tokens)


def make_state(*criteria: Any, rows: slice = slice(None), **options: Any) -> GenerationState:
    prompt, mask = PROMPT[rows], MASK[rows]
    return GenerationState.create(prompt, mask, StopRules(criteria, len(prompt)), **options)


def commit(state: GenerationState, *blocks: list[int], **extra: Any) -> None:
    """Commit one block per row, whose last token is the bonus; finished rows have empty blocks."""
    rows = []
    for tokens, block in zip(state.tokens, blocks, strict=True):
        nodes = [tokens[-1], *block[:-1]] if block else []
        rows.append((nodes, list(range(-1, len(nodes) - 1))))
    tree = DraftTree.from_rows(rows)
    accepted = [list(tree.nodes(row))[1:] for row in range(len(blocks))]
    bonus = [block[-1] if block else None for block in blocks]
    state.commit(Verdict(tree, accepted, bonus, **extra))
