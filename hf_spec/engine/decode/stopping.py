"""When sequences end: rules that look at one row, and criteria that see the whole batch.

transformers' own criteria answer for each row by that row alone, so a row is checked after every
token, however far the others are. Any other criterion may count its calls, return one answer for
all rows or look at whichever row it likes. It is asked as plain `generate()` asks it: once per
step, with all rows of that length (see `GenerationState`).
"""

from __future__ import annotations

from collections.abc import Sequence
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
from hf_spec.engine.decode.copies import own_copy

# Criteria whose answer for a row depends on that row alone. Exactly these: a subclass may do more.
PER_ROW = (StopStringCriteria, MaxTimeCriteria)


def for_one_sequence(criteria: Sequence[Any]) -> list[Any]:
    """The criteria of a call for one of its sequences, where each is a batch of its own."""
    known = (MaxLengthCriteria, EosTokenCriteria, *PER_ROW)
    return [c if type(c) in known else own_copy(c, "several sequences") for c in criteria]


class StopRules:
    """The stopping criteria of one call of `generate()` on B rows, as it prepared them.

    Attributes:
        max_length: longest frame, or None.
        pads: whether a row that ends is padded while others go on. Plain `generate()` does so only
            if there is an end-of-sequence token; without one, all rows go on until each has met
            a rule.
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
    def asks(self) -> bool:
        """Whether any criterion has to be asked step by step, about the whole batch."""
        return bool(self._per_step)

    @property
    def reads_frames(self) -> bool:
        """Whether a rule for single rows looks at more of a frame than its length."""
        return bool(self._per_row)

    @property
    def ends(self) -> list[int]:
        """The tokens that end any sequence, in order."""
        return sorted(self._eos)

    def ends_sequence(self, token: int) -> bool:
        """Whether `token` ends any sequence; processors and drafters need not look past it."""
        return token in self._eos

    def end_row(self, frame: Tensor, token: int) -> bool:
        """Whether a rule for single rows ends a row with its newest token.

        `frame` is the (L,) row as plain `generate()` holds it; on the host unless it is read.
        """
        if token in self._eos:
            return True
        if self.max_length is not None and frame.shape[0] >= self.max_length:
            return True
        return any(bool(criterion(frame[None], None)) for criterion in self._per_row)

    def ask(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Per row whether one of the other criteria ends it; each is called once.

        They are shown (B, L) ids and, if kept, one (B, V) tensor of scores per step, as plain
        `generate()` would show them. Refused are answers neither for all rows nor for each, and
        changes of the text.
        """
        # Tensors of inference mode do not count their changes.
        version = None if input_ids.is_inference() else input_ids._version
        ended = torch.zeros(self.num_rows, dtype=torch.bool, device=input_ids.device)
        for criterion in self._per_step:
            # Combined as plain generate() does it, so whatever it takes for an answer is one here.
            both = ended | criterion(input_ids, scores)
            if both.numel() != self.num_rows:
                raise UnsupportedError(
                    f"{type(criterion).__name__} answered with a shape that makes "
                    f"{tuple(both.shape)} of {self.num_rows} rows; a stopping criterion returns "
                    f"one bool or a bool tensor of shape ({self.num_rows},)"
                )
            if version is not None and input_ids._version != version:
                raise UnsupportedError(
                    f"{type(criterion).__name__} changed the input_ids it was shown; a stopping "
                    "criterion can only end sequences here, so use a logits processor"
                )
            ended = both.reshape(-1)
        going_on = torch.ones_like(ended, dtype=torch.long) & ~ended
        return [not go_on for go_on in going_on.tolist()]
