"""Stopping criteria such as users write, and comparison of calls with them to plain ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_spec import BatchStreamer
from tests.identity import assert_identical

Answer = bool | Tensor


class Recording(StoppingCriteria):
    """Criterion that records the tokens of every call; base class."""

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
    """Criterion that ends all rows at its n-th call."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return len(self.calls) >= self.count


class StoppedError(Exception):
    """Error raised by a criterion."""


class RaiseAtCall(AfterCalls):
    """Criterion that raises at its n-th call."""

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        if len(self.calls) >= self.count:
            raise StoppedError(f"call {self.count}")
        return False


class AnyRowSays(Recording):
    """Criterion that ends all rows if any newest token is one of these; returns one bool."""

    def __init__(self, tokens: list[int]):
        super().__init__()
        self.tokens = tokens

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return any(token in self.tokens for token in input_ids[:, -1].tolist())


class RowSays(AnyRowSays):
    """Criterion that ends all rows if a given row's newest token is one of these; 0-d tensor."""

    def __init__(self, tokens: list[int], row: int):
        super().__init__(tokens)
        self.row = row

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return torch.isin(input_ids[self.row, -1], torch.tensor(self.tokens))


class EachRowSays(AnyRowSays):
    """Criterion that ends each row whose newest token is one of these; one value per row."""

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return torch.isin(input_ids[:, -1], torch.tensor(self.tokens))


class EachRowHasSaid(AnyRowSays):
    """Criterion that ends all rows once each has had one of these tokens; stateful."""

    def __init__(self, tokens: list[int]):
        super().__init__(tokens)
        self.done: dict[int, bool] = {}

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            self.done[row] = self.done.get(row, False) or token in self.tokens
        return all(self.done.values())


class SumOfBatch(Recording):
    """Criterion that ends all rows by a sum over the whole batch, padding included."""

    def __init__(self, modulus: int):
        super().__init__()
        self.modulus = modulus

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        return bool(input_ids[:, -3:].sum() % self.modulus == 0)


class LongestRun(Recording):
    """Criterion that ends a row at its n-th distinct token; stateful, one value per row."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count
        self.seen: dict[int, set[int]] = {}

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            self.seen.setdefault(row, set()).add(token)
        return torch.tensor([len(seen) >= self.count for seen in self.seen.values()])


class Confident(Recording):
    """Criterion that ends all rows if the least confident exceeds `least`; reads all scores."""

    def __init__(self, least: float):
        super().__init__()
        self.least = least

    def decide(self, input_ids: Tensor, scores: Any) -> Answer:
        if scores is None:
            return False
        return scores[-1].softmax(dim=-1).amax(dim=-1).min() > self.least


def run(model: Any, given: dict[str, Any], rules: list[Any]) -> tuple[Any, str, list[Any]]:
    """Return the output, the error and the criteria of a call with fresh copies of `rules`."""
    rules = copy.deepcopy(rules)
    try:
        output = model.generate(**given, stopping_criteria=StoppingCriteriaList(rules))
    except StoppedError as error:
        return None, str(error), rules
    return output, "", rules


def compare(
    model: Any, given: dict[str, Any], rules: list[Any], speculation: dict[str, Any]
) -> tuple[Any, Any]:
    """Check that a call with criteria matches plain `generate()`.

    Compares tokens, the inputs of every criterion call, scores, logits, exceptions and streamed
    tokens, and the statistics with the number of generated tokens.

    Returns:
        Both outputs, None if a criterion raised.
    """
    width = given["input_ids"].shape[1]
    expected, error, right = run(model, given, rules)
    streamed: dict[int, list[int]] = {row: [] for row in range(len(given["input_ids"]))}
    streamer = BatchStreamer(lambda row, tokens: streamed[row].extend(tokens))
    output, problem, mine = run(model, {**given, **speculation, "streamer": streamer}, rules)
    assert problem == error
    for ours, theirs in zip(mine, right, strict=True):
        assert ours.calls == theirs.calls
        for step, at_step in zip(ours.scores or [], theirs.scores or [], strict=True):
            torch.testing.assert_close(step, at_step, atol=2e-4, rtol=1e-4)
    pad = given.get("pad_token_id", 0)
    if error:
        # Plain generate() streams a token after the criteria have seen it.
        wanted = torch.tensor(right[0].calls[-1])[:, :-1]
    else:
        wanted = expected if isinstance(expected, Tensor) else expected.sequences
        assert_identical(model, {**given, **speculation}, output, wanted)
    ends = [width + len(tokens) for tokens in streamed.values()]
    for row, tokens in streamed.items():
        assert wanted[row, width : ends[row]].tolist() == tokens
        assert set(wanted[row, ends[row] :].tolist()) <= {pad}
    if not error and not isinstance(output, Tensor):
        assert [row.new_tokens for row in output.spec_stats.rows] == [end - width for end in ends]
        for part in ("scores", "logits"):
            _check_scores(getattr(output, part), getattr(expected, part), wanted[:, width:])
    return output, expected


def _check_scores(ours: Any, theirs: Any, said: Tensor) -> None:
    """Check that scores are equal until a row ends; after that the output has zeros."""
    assert (ours is None) == (theirs is None)
    for step, (mine, right) in enumerate(zip(ours or [], theirs or [], strict=True)):
        for row in range(len(said)):
            if bool(mine[row].any()):
                torch.testing.assert_close(mine[row], right[row], atol=2e-4, rtol=1e-4)
            else:
                assert bool((said[row, step:] == said[row, step]).all()), "only padding follows"
