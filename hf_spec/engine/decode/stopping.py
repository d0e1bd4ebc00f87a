"""Where sequences end: stop rules of single rows, and criteria that see the whole batch.

The criteria of transformers in `PER_ROW` decide on each row by that row alone, so a row is checked
after every token. Any other criterion may count its calls, return one result for all rows or
compare rows. It is called as plain `generate()` calls it: once per step, with all rows of that
length. A new stop rule of single rows is a branch in `StopRules.__init__` and `StopRules.end_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
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
from hf_spec.engine.decode.copies import independent_copies

# Criteria whose result for a row depends on that row alone. Exact types: a subclass may do more.
PER_ROW = (StopStringCriteria, MaxTimeCriteria)


def for_one_sequence(criteria: Sequence[Any]) -> list[Any]:
    """Return the criteria of a call for one of its sequences, which is a batch of its own."""
    stateless = (MaxLengthCriteria, EosTokenCriteria, *PER_ROW)
    return independent_copies(criteria, lambda one: type(one) in stateless, "several sequences")


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
                limits = [
                    index(x) for x in (self.max_length, criterion.max_length) if x is not None
                ]
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
    def ends(self) -> list[int]:
        """End-of-sequence tokens in increasing order."""
        return sorted(self._eos)

    def ends_sequence(self, token: int) -> bool:
        """Return True for an end-of-sequence token; nothing after it needs to be drafted."""
        return token in self._eos

    def end_row(self, token: int, length: int, padded_ids: Callable[[], Tensor]) -> bool:
        """Return True if a rule of single rows ends a row at its newest token.

        `length` counts the padding of the row; `padded_ids` returns its (L,) ids to criteria that
        read them.
        """
        if token in self._eos or (self.max_length is not None and length >= self.max_length):
            return True
        if not self._per_row:
            return False
        input_ids = padded_ids()[None]
        return any(bool(criterion(input_ids, None)) for criterion in self._per_row)

    def end_rows(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Call each batch criterion once and return per row whether one of them ends it.

        `input_ids` are (B, L) as in plain `generate()`, `scores` one (B, V) per step if kept.

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
