"""Logits processors on the nodes of a draft tree, exact for each node's own prefix.

Four kinds, in the order that the user gave:

* processors of transformers that do not read the prefix run once over all nodes; temperature,
  top-k, top-p, and min-p run together in one kernel on a GPU;
* processors of transformers that read the prefix run once per prefix length, with nodes as rows. If
  the class stores one entry per row of the batch, every row gets a copy with its own entry;
* Whisper's detection of silence sees the roots of the first step together and changes nothing;
* any other class, such as a user's, is called as plain `generate()` calls it: once per step with
  the whole batch, in order. So rows advance together: a round ends for all of them where it ends
  for one, and rows that have ended run on their padding.

Rows that hold sequences of different calls have one list of processors each (`RowProcessors`).
"""

from __future__ import annotations

import copy
import functools
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

Processor = Callable[[Tensor, Tensor], Tensor]

PREFIX_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    hf.LogitNormalization,
)

# Processors in PREFIX_FREE that read only scores, not token ids.
TOKEN_FREE = tuple(kind for kind in PREFIX_FREE if kind is not hf.SuppressTokensLogitsProcessor)

READS_PREFIX = (
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.WatermarkLogitsProcessor,
    hf.RepetitionPenaltyLogitsProcessor,
    hf.WhisperTimeStampLogitsProcessor,
)

# Classes that store one entry per row of the batch, and the attribute that stores it.
STORED_PER_ROW = {
    hf.RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",
    hf.EncoderRepetitionPenaltyLogitsProcessor: "encoder_input_ids",
    hf.EncoderNoRepeatNGramLogitsProcessor: "generated_ngrams",
}

# Processors in STORED_PER_ROW with one entry for all `num_return_sequences` rows of a prompt.
STORED_PER_PROMPT = (
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
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
        entries = _entries(processor)
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
        self._steps: list[Any] = []
        for processor in processors:
            if isinstance(processor, RowProcessors):
                self._steps.append(processor.step(stateless_only))
            elif not stateless_only or (_is_stateless(processor) and not _may_fail(processor)):
                self._append(_step(processor, num_rows, stateless_only))

    def _append(self, step: Any) -> None:
        last = self._steps[-1] if self._steps else None
        if isinstance(last, _Filters) and isinstance(step, _Filters) and last.joins(step):
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
        return any(isinstance(step, _WholeBatch) and step.num_rows > 1 for step in self._steps)

    @property
    def runs_user_code(self) -> bool:
        """True if a processor is code of a user, who may notice a call after the last token."""
        lists = [one for step in self._steps if isinstance(step, _OfRow) for one in step.lists]
        own = any(isinstance(step, (_WholeBatch, _ByNode)) for step in self._steps)
        return own or any(one.runs_user_code for one in lists)

    def filters(self, rows: Sequence[int]) -> list[Filter] | None:
        """Return per node, of these rows, the filter that equals all processors; None without."""
        if not self._steps:
            return [Filter()] * len(rows)
        step = self._steps[0]
        if len(self._steps) > 1 or not isinstance(step, (_Filters, _OfRow)):
            return None
        if isinstance(step, _Filters):
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
        copies = independent_copies(processors, _is_stateless, "several sequences")
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


class _PrefixFree:
    """One call for all nodes."""

    reads_prefix = False

    def __init__(self, processor: Processor):
        self.processor = processor
        self.reads_tokens = type(processor) not in TOKEN_FREE

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        # On a GPU zeros would be a launch, for ids that nothing reads.
        unused = torch.empty(len(rows), 1, dtype=torch.long, device=scores.device)
        return self.processor(unused, scores)


class _Filters:
    """Temperature, top-k, top-p, and min-p, each at most once and in this order.

    Attributes:
        filter: settings of all of them.
    """

    reads_prefix = reads_tokens = False

    def __init__(self, processor: Processor, settings: dict[str, float]):
        self._steps = [_PrefixFree(processor)]
        self._settings = settings

    @property
    def filter(self) -> Filter:
        """Settings of all of them."""
        return Filter(**self._settings)  # type: ignore[arg-type]

    def joins(self, later: _Filters) -> bool:
        """Return True if it now includes the processors of `later`."""
        order = Filter._fields.index
        if max(map(order, self._settings)) >= min(map(order, later._settings)):
            return False
        self._steps += later._steps
        self._settings |= later._settings
        return True

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        if not serves(scores):
            for step in self._steps:
                scores = step(rows, prefixes, scores)
            return scores
        return filter_scores(scores, _on_device(self.filter, scores.device).expand(len(scores), -1))


@functools.cache
def _on_device(settings: Filter, device: torch.device) -> Tensor:
    """Return (1, 4) float32 settings on the device.

    They are never freed: graphs of earlier calls keep their address, not the tensor.
    """
    return send([torch.tensor([settings], dtype=torch.float32)], device)[0]


class _ByLength:
    """One call per prefix length."""

    reads_prefix = reads_tokens = True

    def __init__(self, processor: Processor):
        self.processor = processor

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        groups: dict[int, list[int]] = defaultdict(list)
        for node, prefix in enumerate(prefixes):
            groups[prefix.shape[0]].append(node)
        for nodes in groups.values():
            stacked = torch.stack([prefixes[node] for node in nodes])
            if len(nodes) == len(rows):
                return self.processor(stacked, scores)
            scores[nodes] = self.processor(stacked, scores[nodes])
        return scores


class _FirstStep:
    """One call with the roots of Whisper's first step, which changes no scores."""

    reads_prefix = reads_tokens = True

    def __init__(self, processor: hf.WhisperNoSpeechDetection):
        self.processor = processor

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        begin = self.processor.begin_index
        first = [node for node, prefix in enumerate(prefixes) if len(prefix) == begin]
        if first:
            self.processor(torch.stack([prefixes[node] for node in first]), scores[first])
        return scores


class _ByNode:
    """One call per node, of the processor of its row, which is made for a batch of one."""

    reads_prefix = reads_tokens = True

    def __init__(self, by_row: Sequence[Processor], ignores_errors: bool = False):
        self.by_row, self.ignores_errors = by_row, ignores_errors

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        results = []
        for row, prefix, score in zip(rows, prefixes, scores, strict=True):
            try:
                results.append(self.by_row[row](prefix[None], score[None].clone())[0])
            except Exception:
                if not self.ignores_errors:
                    raise
                results.append(score)
        return torch.stack(results)


class _WholeBatch:
    """One call with all rows of the batch, at the same step.

    Rules that are lossy visit other nodes than one of each row. Then the processor is called once
    per node, with a batch that has the node's prefix in every row.
    """

    reads_prefix = reads_tokens = True

    def __init__(self, processor: Processor, num_rows: int):
        self.processor, self.num_rows = processor, num_rows

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        if list(rows) == list(range(self.num_rows)):
            return self.processor(torch.stack([*prefixes]), scores)
        results = []
        for row, prefix, score in zip(rows, prefixes, scores, strict=True):
            batch = prefix.expand(self.num_rows, -1).clone()
            results.append(self.processor(batch, score.expand(self.num_rows, -1).clone())[row])
        return torch.stack(results)


def _is_stateless(processor: Any) -> bool:
    """Return True for the classes of transformers that remember no calls."""
    kinds = (*PREFIX_FREE, *READS_PREFIX, *STORED_PER_ROW, hf.PrefixConstrainedLogitsProcessor)
    return type(processor) in kinds


def _may_fail(processor: Any) -> bool:
    """Return True for a class of transformers that raises an error on some scores.

    The self-hashing watermark indexes with an empty list of floats where none of the forty best
    tokens is on its green list. It is also slow, and drafts need no watermark.
    """
    is_watermark = type(processor) is hf.WatermarkLogitsProcessor
    return is_watermark and processor.seeding_scheme == "selfhash"


def _step(processor: Any, num_rows: int, is_draft: bool = False) -> Any:
    """Return the step that applies a processor to nodes, by its kind."""
    kind = type(processor)
    if kind in PREFIX_FREE:
        settings = _filter_settings(processor)
        return _Filters(processor, settings) if settings else _PrefixFree(processor)
    if isinstance(processor, hf.WhisperNoSpeechDetection):
        return _FirstStep(processor)
    if kind is hf.PrefixConstrainedLogitsProcessor:
        return _ByNode([_constrained(processor, row) for row in range(num_rows)], is_draft)
    entries = _entries(processor)
    if entries is not None:
        indices = [row * len(entries) // num_rows for row in range(num_rows)]
        return _ByNode([_with_entries(processor, entries[i : i + 1]) for i in indices])
    if kind in READS_PREFIX:
        return _ByLength(processor)
    return _WholeBatch(processor, num_rows)


def _filter_settings(processor: Any) -> dict[str, float]:
    """Return the field of a `Filter` that equals a processor; empty if there is none."""
    kind = type(processor)
    if kind is hf.TemperatureLogitsWarper:
        return {"temperature": processor.temperature}
    if getattr(processor, "filter_value", 0.0) != -torch.inf:
        return {}
    if kind is hf.TopKLogitsWarper:
        return {"top_k": processor.top_k}
    if getattr(processor, "min_tokens_to_keep", 2) > 1:
        return {}
    if kind is hf.TopPLogitsWarper:
        return {"removed_share": 1 - processor.top_p}
    return {"min_p": processor.min_p} if kind is hf.MinPLogitsWarper else {}


def _entries(processor: Any) -> Tensor | list[Any] | None:
    """Return the entries that the processor stores per row of the batch, if any."""
    attribute = STORED_PER_ROW.get(type(processor))
    entries = getattr(processor, attribute) if attribute else None
    return entries if isinstance(entries, (Tensor, list)) else None


def _with_entries(processor: Any, entries: Tensor | list[Any]) -> Any:
    """Return a copy for a batch of one with these entries."""
    row_processor = copy.copy(processor)
    setattr(row_processor, STORED_PER_ROW[type(processor)], entries)
    if hasattr(row_processor, "batch_size"):
        row_processor.batch_size = 1
    return row_processor


def _constrained(processor: hf.PrefixConstrainedLogitsProcessor, row: int) -> Processor:
    """Return the processor for one row, whose function gets the number of the row's prompt."""
    allowed = processor._prefix_allowed_tokens_fn
    return hf.PrefixConstrainedLogitsProcessor(
        lambda _, ids: allowed(row // processor._num_beams, ids), 1
    )
