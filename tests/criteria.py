"""Stopping criteria of every kind that a user may write; each keeps what it was shown."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

Answer = bool | Tensor


class Recording(StoppingCriteria):
    """Keeps the text of every call, then decides."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []
        self.scores: list[Tensor] | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Answer:
        self.calls.append(input_ids.tolist())
        assert scores is None or len(scores) == len(self.calls)
        self.scores = None if scores is None else list(scores)
        return self.decide(input_ids, scores)

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return False


class AfterCalls(Recording):
    """Ends everything with its n-th call."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return len(self.calls) >= self.count


class StoppedError(Exception):
    """Raised by a criterion."""


class RaiseAtCall(AfterCalls):
    """Fails at its n-th call."""

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        if len(self.calls) >= self.count:
            raise StoppedError(f"call {self.count}")
        return False


class AnyRowSays(Recording):
    """Ends everything when any row says one of these tokens; one bool."""

    def __init__(self, tokens: list[int]):
        super().__init__()
        self.tokens = tokens

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return any(token in self.tokens for token in input_ids[:, -1].tolist())


class RowSays(AnyRowSays):
    """Ends everything when one certain row says one of these tokens; a tensor of no dimension."""

    def __init__(self, tokens: list[int], row: int):
        super().__init__(tokens)
        self.row = row

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return torch.isin(input_ids[self.row, -1], torch.tensor(self.tokens))


class EachRowSays(AnyRowSays):
    """Ends the rows that say one of these tokens; a tensor per row."""

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return torch.isin(input_ids[:, -1], torch.tensor(self.tokens))


class EachRowHasSaid(AnyRowSays):
    """Ends everything when every row has said one of these tokens; remembers the rows."""

    def __init__(self, tokens: list[int]):
        super().__init__(tokens)
        self.done: dict[int, bool] = {}

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            self.done[row] = self.done.get(row, False) or token in self.tokens
        return all(self.done.values())


class SumOfBatch(Recording):
    """Ends everything by a sum over the whole batch, padding included."""

    def __init__(self, modulus: int):
        super().__init__()
        self.modulus = modulus

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return bool(input_ids[:, -3:].sum() % self.modulus == 0)


class LongestRun(Recording):
    """Ends a row at its n-th different token; remembers every row's tokens; a tensor per row."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count
        self.seen: dict[int, set[int]] = {}

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            self.seen.setdefault(row, set()).add(token)
        return torch.tensor([len(seen) >= self.count for seen in self.seen.values()])


class Confident(Recording):
    """Ends everything when the least certain row is this certain; reads the scores of all rows."""

    def __init__(self, least: float):
        super().__init__()
        self.least = least

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        if scores is None:
            return False
        return scores[-1].softmax(dim=-1).amax(dim=-1).min() > self.least
