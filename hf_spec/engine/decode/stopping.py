"""Where sequences end: stop rules of single rows, and criteria that see the whole batch.

The criteria of transformers in `PER_ROW` decide on each row by that row alone, so a row is checked
after every token. Any other criterion may count its calls, return one result for all rows or
compare rows. It is called as plain `generate()` calls it: once per step, with all rows of that
length. A new stop rule of single rows is a branch in `StopRules.__init__` and `StopRules.end_row`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.copies import independent_copy
from hf_spec.engine.decode.row_tokens import RowTokens
from hf_spec.engine.forward.draft_tree import Verdict

# Criteria whose result for a row depends on that row alone. Exact types: a subclass may do more.
PER_ROW = (StopStringCriteria, MaxTimeCriteria)

# Most tokens that a row may be ahead of the step at which criteria were evaluated. Longer drafts
# are not made: a stop before them would make them useless.
MAX_LEAD = 32


def for_one_sequence(criteria: Sequence[Any]) -> list[Any]:
    """Return the criteria of a call for one of its sequences, which is a batch of its own."""
    stateless = (MaxLengthCriteria, EosTokenCriteria, *PER_ROW)
    return [
        criterion
        if type(criterion) in stateless
        else independent_copy(criterion, "several sequences")
        for criterion in criteria
    ]


class StopRules:
    """Stopping criteria of one call of `generate()` on B rows, as it prepared them.

    Attributes:
        num_rows: B.
        max_length: maximum padded length in tokens, or None.
        pads: True if a row that ends is padded while others continue. Plain `generate()` does so
            only with an end-of-sequence token; without one, all rows continue until each has met a
            rule.
    """

    def __init__(self, criteria: Sequence[Any], num_rows: int):
        self.num_rows = num_rows
        self.max_length: int | None = None
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._eos: set[int] = set()
        self._per_row: list[Any] = []
        self._per_step: list[Any] = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                limits = [x for x in (self.max_length, criterion.max_length) if x is not None]
                self.max_length = min(limits)
            elif type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.tolist())
            elif type(criterion) in PER_ROW:
                self._per_row.append(criterion)
            else:
                self._per_step.append(criterion)

    @property
    def has_batch_criteria(self) -> bool:
        """True if a criterion must be called step by step with the whole batch."""
        return bool(self._per_step)

    @property
    def reads_tokens(self) -> bool:
        """True if a rule of single rows reads more of a row than its length and newest token."""
        return bool(self._per_row)

    @property
    def ends(self) -> list[int]:
        """End-of-sequence tokens in increasing order."""
        return sorted(self._eos)

    def ends_sequence(self, token: int) -> bool:
        """Return True for an end-of-sequence token; nothing after it needs to be drafted."""
        return token in self._eos

    def end_row(self, padded_ids: Tensor, token: int) -> bool:
        """Return True if a rule of single rows ends a row at its newest token.

        `padded_ids` is the (L,) row as plain `generate()` has it, on the host unless
        `reads_tokens`.
        """
        if token in self._eos:
            return True
        if self.max_length is not None and padded_ids.shape[0] >= self.max_length:
            return True
        return any(bool(criterion(padded_ids[None], None)) for criterion in self._per_row)

    def end_rows(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Call each batch criterion once and return per row whether one of them ends it.

        Args:
            input_ids: (B, L) as plain `generate()` has them at this step.
            scores: one (B, V) tensor per step where scores are kept, else None.

        Raises:
            UnsupportedError: a result has a shape for neither all rows nor each row, or a
                criterion changed `input_ids`.
        """
        # Tensors of inference mode do not count their changes.
        version = None if input_ids.is_inference() else input_ids._version
        ended = torch.zeros(self.num_rows, dtype=torch.bool, device=input_ids.device)
        for criterion in self._per_step:
            # The same expression as in plain generate(), so the same results are valid.
            both = ended | criterion(input_ids, scores)
            if both.numel() != self.num_rows:
                raise UnsupportedError(
                    f"{type(criterion).__name__} returned a shape that makes "
                    f"{tuple(both.shape)} of {self.num_rows} rows; a stopping criterion returns "
                    f"one bool or a bool tensor of shape ({self.num_rows},)"
                )
            if version is not None and input_ids._version != version:
                raise UnsupportedError(
                    f"{type(criterion).__name__} changed its input_ids in place; a stopping "
                    "criterion can only end sequences here, so use a logits processor"
                )
            ended = both.reshape(-1)
        running = torch.ones_like(ended, dtype=torch.long) & ~ended
        return [not runs for runs in running.tolist()]


@dataclass(kw_only=True)
class StoppingRows(RowTokens):
    """Rows that end where plain `generate()` would end them.

    Rules of single rows are checked after every token. Batch criteria are evaluated for each step
    that all rows have reached; rows that are ahead keep their tokens until then.

    Attributes:
        stop: stop rules of the rows that the call began with.
        pad_token_id: token after the end of rows that are shorter than the longest one.
        keep_scores: True if the processed scores of every token are stored.
    """

    stop: StopRules
    pad_token_id: int = 0
    keep_scores: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stops = [self.stop] * self.num_rows
        # Per row: the number of generated tokens at which a rule first held, and the last step for
        # which batch criteria were evaluated.
        self._ends: list[int | None] = [None] * self.num_rows
        self._evaluated = [0] * self.num_rows
        # Scores that criteria have seen, (B, V) per step, and those of ended rows on padding.
        self._shown_scores: list[Tensor] = []
        self._padding_scores: list[list[Tensor]] = [[] for _ in self.tokens]

    @property
    def draft_limits(self) -> dict[int, int]:
        """Unfinished row -> maximum depth of its draft; one token of room is for the bonus."""
        return {row: self.room(row) - 1 for row in self.unfinished}

    def room(self, row: int) -> int:
        """Return how many tokens the row may still gain, at least 1 for an unfinished row."""
        stop = self._stops[row]
        room = self.padded_ids.shape[1] - 1
        if stop.max_length is not None:
            room = stop.max_length - self.padded_length(row)
        lead = self.generated[row] - self._evaluated[row] if stop.has_batch_criteria else 0
        return room if lead <= 0 else min(room, max(1, MAX_LEAD - lead))

    def missing_scores(self) -> dict[int, range]:
        """Return per ended row the positions of padding whose scores the criteria wait for.

        Position 0 is predicted by the row's last token. Valid between two rounds.
        """
        if not (self.keep_scores and self.stop.has_batch_criteria and self.stop.pads):
            return {}
        ended = [self._ended_by(row, self._evaluated[row]) for row in range(self.num_rows)]
        running = [n for n, gone in zip(self.generated, ended, strict=True) if not gone]
        wanted = {
            row: range(len(self._padding_scores[row]), min(running) - self.generated[row])
            for row, gone in enumerate(ended)
            if gone and running
        }
        return {row: positions for row, positions in wanted.items() if positions}

    def _set_rules(self, row: int, stop: StopRules) -> None:
        self._stops[row], self._ends[row], self._evaluated[row] = stop, None, 0

    def _extend(self, row: int, verdict: Verdict) -> None:
        """Append the verdict's tokens to `row` and note where a rule of single rows holds."""
        stop, before = self._stops[row], self.generated[row]
        accepted = len(verdict.accepted[row])
        for index, token in enumerate(verdict.tokens(row)):
            self.append(row, token, index + 1 if index < accepted else 0)
            if verdict.scores is not None:
                self.scores[row].append(verdict.scores[row][index])
            if verdict.logits is not None:
                self.logits[row].append(verdict.logits[row][index])
            with self.containing(row):
                if self._ends[row] is None and stop.end_row(self._ids_for_rules(row), token):
                    self._ends[row] = self.generated[row]
            if row in self.errors or (self._ends[row] is not None and stop.pads):
                break
        tree, gained = verdict.tree, self.generated[row] - before
        self.stats.rows[self.sequence[row]].count(
            tree.num_drafted(row), tree.height(row), min(accepted, gained), gained
        )

    def _ids_for_rules(self, row: int) -> Tensor:
        """Return the (L,) padded ids of `row`, on the host unless a rule reads them."""
        ids = self.padded_ids[row, : self.padded_length(row)]
        return ids.to(self.device) if self._stops[row].reads_tokens else ids

    def _truncate_at_stops(self) -> None:
        """Truncate and finish every row whose end is known and reached."""
        common_end = self._common_end() if self._end_together else None
        for row, end in enumerate(self._ends):
            last = common_end if self._end_together else end
            if last is not None and self.generated[row] >= last:
                self._truncate(row, last)
                self.finished[row] = True

    @property
    def _end_together(self) -> bool:
        """True if rows wait for each other; see `StopRules.pads`."""
        return not self.stop.pads and self.stop.num_rows > 1

    def _common_end(self) -> int | None:
        """Return where all rows end if they wait for each other; None if not known yet."""
        ends = [end for end in self._ends if end is not None]
        if len(ends) == self.num_rows:
            return max(ends)
        longest = self.stop.max_length
        return None if longest is None else longest - self.prompt_length

    def _certain_lengths(self) -> list[int]:
        """Return per row how many generated tokens no criterion can remove any more."""
        lengths = list(self.generated)
        if self._end_together:
            # All rows get the length of the longest; those that have not ended gain at least one.
            least = [
                count + 1 if end is None else end
                for count, end in zip(self.generated, self._ends, strict=True)
            ]
            lengths = [min(length, max(least)) for length in lengths]
        return [
            min(length, done) if stop.has_batch_criteria else length
            for length, done, stop in zip(lengths, self._evaluated, self._stops, strict=True)
        ]

    def _evaluate_criteria(self) -> None:
        """Evaluate the batch criteria of every call for all steps that its rows have reached."""
        for stop in dict.fromkeys(self._stops):
            rows = [row for row in range(self.num_rows) if self._stops[row] is stop]
            # Isolated rows have rules of their own, so an error belongs to one row.
            if stop.has_batch_criteria and self.errors.keys().isdisjoint(rows):
                with self.containing(rows[0]):
                    self._evaluate_steps(stop, rows)

    def _evaluate_steps(self, stop: StopRules, rows: Sequence[int]) -> None:
        while self._reached(stop, rows, step := self._evaluated[rows[0]] + 1):
            scores = self._scores_until(rows, step) if self.keep_scores else None
            ended = stop.end_rows(self._padded_batch(rows, step, self.pad_token_id), scores)
            for row, ends in zip(rows, ended, strict=True):
                self._evaluated[row] = step
                if ends and not self._ended_by(row, step):
                    self._ends[row] = step
            if any(ended):
                self._truncate_at_stops()

    def _reached(self, stop: StopRules, rows: Sequence[int], step: int) -> bool:
        """Return True if plain `generate()` takes this step and all its tokens are committed."""
        ended = {row for row in rows if self._ended_by(row, step - 1)}
        # Criteria may read the scores of ended rows too, so these must have been computed.
        scored = {r for r in ended if not self.keep_scores or len(self._all_scores(r)) >= step}
        return len(ended) < len(rows) and all(
            self.generated[row] >= step or (stop.pads and row in scored) for row in rows
        )

    def _ended_by(self, row: int, step: int) -> bool:
        """Return True if a rule held for `row` within its first `step` generated tokens."""
        end = self._ends[row]
        return end is not None and end <= step

    def _all_scores(self, row: int) -> list[Tensor]:
        return self.scores[row] + self._padding_scores[row]

    def _scores_until(self, rows: Sequence[int], step: int) -> tuple[Tensor, ...]:
        """Return the scores of the first `step` steps, each (rows, V)."""
        scores = [self._all_scores(row) for row in rows]
        for index in range(len(self._shown_scores), step):
            batch = torch.stack([row_scores[index] for row_scores in scores])
            self._shown_scores.append(batch)
            for row, row_scores in zip(rows, batch, strict=True):
                if index < len(self.scores[row]):
                    # A view of the batch instead of a second copy.
                    self.scores[row][index] = row_scores
        return tuple(self._shown_scores)
