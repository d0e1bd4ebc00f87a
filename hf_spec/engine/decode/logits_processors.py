"""Logits processors on the nodes of a draft tree, exact for each node's own prefix.

`processor_steps` defines how each class of processors runs. Rows that hold sequences of different
calls have one list of processors each (`RowProcessors`).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hf_spec_kernels import Filter, filter_scores, serves
from torch import Tensor
from transformers.generation import logits_process as hf

from hf_spec.backend.device.transfer import send
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.engine.decode.copies import independent_copies
from hf_spec.engine.decode.processor_steps import (
    STORED_PER_PROMPT,
    ByNode,
    Filters,
    Step,
    WholeBatch,
    is_stateless,
    may_fail,
    row_entries,
    step_of,
)

UNSUPPORTED = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale runs a second forward "
    "pass for every token of the output, which a draft tree cannot share",
    hf.ClassifierFreeGuidanceLogitsProcessor: "it has two rows of scores per row of tokens",
    hf.DiaClassifierFreeGuidanceLogitsProcessor: "it has two rows of scores per row of tokens",
    hf.DiaEOSChannelFilterLogitsProcessor: "its rows are channels that depend on each other",
    hf.DiaEOSDelayPatternLogitsProcessor: "its rows are channels that depend on each other",
}


def check_processors(processors: Sequence[Any], num_rows: int) -> None:
    """Raise `OptionError` or `UnsupportedError` if a processor cannot be exact on draft trees."""
    for processor in processors:
        # The test of transformers' LogitsProcessorList, which would fail during generation.
        if not callable(processor) or len(inspect.signature(processor.__call__).parameters) > 2:
            raise OptionError(
                f"logits_processor contains {processor!r}, which cannot be called with "
                "(input_ids, scores); pass instances of LogitsProcessor or functions of those two"
            )
        reason = next(
            (why for kind, why in UNSUPPORTED.items() if isinstance(processor, kind)), None
        )
        entries = row_entries(processor)
        shared = isinstance(processor, STORED_PER_PROMPT)
        if entries is not None and (num_rows % len(entries) if shared else num_rows - len(entries)):
            reason = f"it stores {len(entries)} rows for a batch of {num_rows}"
        if reason is not None:
            raise UnsupportedError(
                f"{type(processor).__name__} cannot be used with spec_strategy: {reason}; "
                "leave it out or call generate() without spec_strategy"
            )


class NodeProcessors:
    """Processors of one `generate()` call, applied to nodes of trees.

    `stateless_only`, for draft models, leaves out classes that may remember calls, and those that
    fail on some scores, since draft scores are arbitrary. Errors of `prefix_allowed_tokens_fn` are
    ignored then, since it may not know a prefix that is only drafted.
    """

    def __init__(self, processors: Sequence[Any], num_rows: int, stateless_only: bool = False):
        self._steps: list[Step] = []
        for processor in processors:
            if isinstance(processor, RowProcessors):
                self._steps.append(processor.step(stateless_only))
            elif not stateless_only or (is_stateless(processor) and not may_fail(processor)):
                self._append(step_of(processor, num_rows, stateless_only))

    def _append(self, step: Step) -> None:
        last = self._steps[-1] if self._steps else None
        if isinstance(last, Filters) and isinstance(step, Filters) and last.joins(step):
            return
        self._steps.append(step)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_identity(self) -> bool:
        """True if they change no scores, until a row begins with processors of its own."""
        return not any(not isinstance(step, _OfRow) or any(step.lists) for step in self._steps)

    @property
    def reads_prefix(self) -> bool:
        """True if any processor needs the tokens before a node."""
        return any(step.reads_prefix for step in self._steps)

    @property
    def reads_tokens(self) -> bool:
        """True if any processor needs the token id of each score."""
        return any(step.reads_tokens for step in self._steps)

    @property
    def reads_batch(self) -> bool:
        """True if a processor reads all rows of a step together."""
        return any(isinstance(step, WholeBatch) and step.num_rows > 1 for step in self._steps)

    @property
    def runs_user_code(self) -> bool:
        """True if a processor is code of a user, who may notice a call after the last token."""
        lists = [one for step in self._steps if isinstance(step, _OfRow) for one in step.lists]
        own = any(isinstance(step, (WholeBatch, ByNode)) for step in self._steps)
        return own or any(one.runs_user_code for one in lists)

    def filters(self, rows: Sequence[int]) -> list[Filter] | None:
        """Return per node, of these rows, the filter that equals all processors; None without."""
        if not self._steps:
            return [Filter()] * len(rows)
        step = self._steps[0]
        if len(self._steps) > 1 or not isinstance(step, (Filters, _OfRow)):
            return None
        if isinstance(step, Filters):
            return [step.filter] * len(rows)
        by_row = {row: step.lists[row].filters([0]) for row in set(rows)}
        found = [by_row[row] for row in rows]
        return None if None in found else [filters[0] for filters in found if filters]

    def __call__(
        self,
        rows: Sequence[int],
        prefixes: Sequence[Tensor] | None,
        scores: Tensor,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the processed scores of M nodes; `scores` may be changed in place.

        Args:
            rows: row of each node.
            prefixes: padded ids up to and including each node, (L,) int64; only read if
                `reads_prefix`.
            scores: (M, V) float32, or (M, R) of `token_ids` if no processor `reads_tokens`.
            token_ids: (R,) tokens whose (M, R) scores are returned; the others have the score -inf.
        """
        whole = token_ids is not None and self.reads_tokens
        for index, step in enumerate(self._steps):
            if whole and not any(later.reads_tokens for later in self._steps[index:]):
                scores, whole = scores[:, token_ids], False
            scores = step(rows, prefixes or [], scores)
        return scores[:, token_ids] if whole else scores


class RowProcessors:
    """One list of processors per row, for rows that hold sequences of different calls.

    As an entry in a list of processors it represents the current processors of each row, which
    `begin` may replace at any time. An error of a row's processor is passed to `on_error` and
    leaves the scores of that row unchanged; other rows are not affected.
    """

    def __init__(self, num_rows: int, on_error: Callable[[int, Exception], None]):
        self.all = [NodeProcessors([], 1) for _ in range(num_rows)]
        self.stateless = list(self.all)
        self._on_error = on_error

    def step(self, stateless_only: bool) -> _OfRow:
        """Return a step that applies to each row the processors it has at that time."""
        if stateless_only:
            # A processor that fails on draft scores costs acceptance, not the row. A failure on
            # the target's scores is reported by the verifier.
            return _OfRow(self.stateless, lambda row, error: None)
        return _OfRow(self.all, self._on_error)

    def begin(self, row: int, processors: Sequence[Any]) -> None:
        """Set the processors of a row's new sequence, as prepared for a batch of one."""
        copies = independent_copies(processors, is_stateless, "several sequences")
        self.all[row] = NodeProcessors(copies, 1)
        self.stateless[row] = NodeProcessors(copies, 1, stateless_only=True)


class _OfRow:
    """Applies the processors of each row."""

    def __init__(self, lists: Sequence[NodeProcessors], on_error: Callable[[int, Exception], None]):
        self.lists, self._on_error = lists, on_error

    @property
    def reads_prefix(self) -> bool:
        return any(processors.reads_prefix for processors in self.lists)

    @property
    def reads_tokens(self) -> bool:
        return any(processors.reads_tokens for processors in self.lists)

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        if serves(scores):
            filters = [self.lists[row].filters([0]) for row in rows]
            if None not in filters:
                found = [one[0] for one in filters if one]
                settings = torch.tensor(found, dtype=torch.float32)
                return filter_scores(scores, send([settings], scores.device)[0])
        groups: dict[int, list[int]] = defaultdict(list)
        for node, row in enumerate(rows):
            if self.lists[row]:
                groups[row].append(node)
        for row, nodes in groups.items():
            row_prefixes = [prefixes[node] for node in nodes] if prefixes else None
            try:
                scores[nodes] = self.lists[row]([0] * len(nodes), row_prefixes, scores[nodes])
            except Exception as error:  # noqa: BLE001 - a row's error must not reach other rows
                self._on_error(row, error)
        return scores
