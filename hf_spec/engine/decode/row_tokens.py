"""Committed tokens of the rows of a batch, and what is stored for each of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.common.outputs import RowStats, SpecStats

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RowTokens:
    """Tokens, scores, errors and statistics of B rows.

    Attributes:
        padded_ids: (B, capacity) int64 on the host. Row r up to `padded_length(r)` is what plain
            `generate()` calls `input_ids`: the prompt with its left padding, then the generated
            tokens.
        prompt_mask: (B, L) bool on the host, False where the prompt is padding.
        tokens: per row the prompt and the generated tokens, without padding.
        isolated: True if an error in a row's processor, stop rule or draw ends only that row, as
            sequences of different calls need it. Otherwise the error is raised.
        device: device of the user's `input_ids`, where processors, stop rules and the output are.
        stats: statistics of the call.
        finished: per row True if it gets no more tokens; such a row may `begin` again.
        generated: per row the number of generated tokens.
        sequence: per row the index of its sequence in the call; `stats.rows` has that order.
        errors: the errors that ended rows, until these rows `begin` again.
        scores, logits: per row and generated token (V,) float32, where the output needs them.
    """

    padded_ids: Tensor
    prompt_mask: Tensor
    tokens: list[list[int]]
    isolated: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stats: SpecStats = field(init=False)
    finished: list[bool] = field(init=False)
    generated: list[int] = field(init=False)
    sequence: list[int] = field(init=False)
    errors: dict[int, str] = field(init=False)
    scores: list[list[Tensor]] = field(init=False)
    logits: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.stats = SpecStats([RowStats() for _ in self.tokens])
        self.finished = [False] * self.num_rows
        self.generated = [0] * self.num_rows
        self.sequence = list(range(self.num_rows))
        self.errors = {}
        self.scores = [[] for _ in self.tokens]
        self.logits = [[] for _ in self.tokens]
        self._prompt_lengths = [self.prompt_length] * self.num_rows
        # Per row and generated token its depth in the draft tree, 0 for a bonus token.
        self._depths: list[list[int]] = [[] for _ in self.tokens]

    @property
    def num_rows(self) -> int:
        """B, finished rows included."""
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Width of the padded prompt."""
        return self.prompt_mask.shape[1]

    @property
    def unfinished(self) -> list[int]:
        """Rows that still generate."""
        return [row for row, done in enumerate(self.finished) if not done]

    def padded_length(self, row: int) -> int:
        """Return the length of `row` as plain `generate()` counts it, padding included."""
        return self._prompt_lengths[row] + self.generated[row]

    def prefix(self, row: int, path: Sequence[int] = ()) -> Tensor:
        """Return (L,) padded ids of `row`, then `path`, on `device`; the next call changes them."""
        return self._write(row, path).to(self.device)

    def prefixes(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return a copy of the `prefix` of every (row, path) pair."""
        # Paths of one row are written to the same memory, so views would change.
        return [self.prefix(row, path).clone() for row, path in zip(rows, paths, strict=True)]

    def append(self, row: int, token: int, depth: int = 0) -> None:
        """Commit one token to `row`; `depth` is its depth in the draft tree, 0 if not drafted."""
        self._write(row, (token,))
        self.generated[row] += 1
        self.tokens[row].append(token)
        self._depths[row].append(depth)

    def fail(self, row: int, error: Exception) -> None:
        """End an isolated row with an error, so that it commits nothing more; else raise it."""
        if not self.isolated:
            raise error
        logger.warning("a sequence ended with an error", exc_info=error)
        # As text: a traceback would keep this step's variables alive, and with them the KV cache.
        self.errors.setdefault(row, f"{type(error).__name__}: {error}")
        self.finished[row] = True

    def _restart(self, row: int, sequence: int, prompt: Sequence[int]) -> None:
        """Replace the contents of a finished row by the prompt of another sequence."""
        self._prompt_lengths[row] = self.generated[row] = 0
        self._write(row, prompt)
        self._prompt_lengths[row] = len(prompt)
        self.tokens[row] = list(prompt)
        self.sequence[row] = sequence
        self.finished[row] = False
        self.errors.pop(row, None)
        self._depths[row], self.scores[row], self.logits[row] = [], [], []
        missing = sequence + 1 - len(self.stats.rows)
        self.stats.rows += [RowStats() for _ in range(missing)]

    def _truncate(self, row: int, length: int) -> None:
        """Drop the generated tokens of `row` after the first `length`, and what belongs to them."""
        surplus = self.generated[row] - length
        self.generated[row] = length
        depths = self._depths[row]
        self.stats.rows[self.sequence[row]].discount(depths[len(depths) - surplus :])
        for values in (self.tokens[row], depths, self.scores[row], self.logits[row]):
            del values[len(values) - surplus :]

    def _padded_batch(self, rows: Sequence[int], step: int, pad_token_id: int) -> Tensor:
        """Return the (rows, L) ids of plain `generate()` after `step` tokens; ended rows padded."""
        prompt = self._prompt_lengths[rows[0]]
        batch = self.padded_ids[list(rows), : prompt + step]
        for index, row in enumerate(rows):
            if self.generated[row] < step:
                batch[index, prompt + self.generated[row] :] = pad_token_id
        return batch.to(self.device)

    def _write(self, row: int, path: Sequence[int]) -> Tensor:
        """Write `path` behind the committed tokens of `row`; return both, (L,) on the host."""
        start = self.padded_length(row)
        end = start + len(path)
        while end > self.padded_ids.shape[1]:
            self.padded_ids = torch.cat([self.padded_ids, torch.zeros_like(self.padded_ids)], dim=1)
        # An assignment of NumPy takes a fraction of the time of one of PyTorch.
        self.padded_ids.numpy()[row, start:end] = path
        return self.padded_ids[row, :end]
