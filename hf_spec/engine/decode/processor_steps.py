"""How each class of logits processors runs on the nodes of a draft tree.

Four kinds, in the order that the user gave:

* processors of transformers that do not read the prefix run once over all nodes; temperature,
  top-k, top-p, and min-p run together in one kernel on a GPU;
* processors of transformers that read the prefix run once per prefix length, with nodes as rows. If
  the class stores one entry per row of the batch, every row gets a copy with its own entry;
* Whisper's detection of silence sees the roots of the first step together and changes nothing;
* any other class, such as a user's, is called as plain `generate()` calls it: once per step with
  the whole batch, in order. So rows advance together: a round ends for all of them where it ends
  for one, and rows that have ended run on their padding.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from hf_spec_kernels import Filter, filter_scores, serves
from torch import Tensor
from transformers.generation import logits_process as hf

from hf_spec.backend.device.transfer import send

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


class Step(Protocol):
    """Applies one processor, or several together, to the nodes of one forward pass."""

    @property
    def reads_prefix(self) -> bool:
        """True if it needs the tokens before a node."""

    @property
    def reads_tokens(self) -> bool:
        """True if it needs the token id of each score."""

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Return the processed (M, V) scores of M nodes; see `NodeProcessors`."""


class PrefixFree:
    """A processor that does not read the prefix."""

    reads_prefix = False

    def __init__(self, processor: Processor):
        self.processor = processor
        self.reads_tokens = type(processor) not in TOKEN_FREE

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Call it once with all nodes."""
        # On a GPU zeros would be a launch, for ids that nothing reads.
        unused = torch.empty(len(rows), 1, dtype=torch.long, device=scores.device)
        return self.processor(unused, scores)


class Filters:
    """Temperature, top-k, top-p, and min-p, each at most once and in this order.

    Attributes:
        filter: settings of all of them.
    """

    reads_prefix = reads_tokens = False

    def __init__(self, processor: Processor, settings: dict[str, float]):
        self._steps = [PrefixFree(processor)]
        self._settings = settings

    @property
    def filter(self) -> Filter:
        """Settings of all of them."""
        return Filter(**self._settings)  # type: ignore[arg-type]

    def joins(self, later: Filters) -> bool:
        """Return True if it now includes the processors of `later`."""
        order = Filter._fields.index
        if max(map(order, self._settings)) >= min(map(order, later._settings)):
            return False
        self._steps += later._steps
        self._settings |= later._settings
        return True

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Run them in one kernel on a GPU, elsewhere one by one."""
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


class ByLength:
    """A processor that reads the prefix."""

    reads_prefix = reads_tokens = True

    def __init__(self, processor: Processor):
        self.processor = processor

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Call it once per prefix length, with nodes as rows."""
        groups: dict[int, list[int]] = defaultdict(list)
        for node, prefix in enumerate(prefixes):
            groups[prefix.shape[0]].append(node)
        for nodes in groups.values():
            stacked = torch.stack([prefixes[node] for node in nodes])
            if len(nodes) == len(rows):
                return self.processor(stacked, scores)
            scores[nodes] = self.processor(stacked, scores[nodes])
        return scores


class FirstStep:
    """Whisper's detection of silence."""

    reads_prefix = reads_tokens = True

    def __init__(self, processor: hf.WhisperNoSpeechDetection):
        self.processor = processor

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Call it once, with the roots of the first step; return `scores` as they are."""
        begin = self.processor.begin_index
        first = [node for node, prefix in enumerate(prefixes) if len(prefix) == begin]
        if first:
            self.processor(torch.stack([prefixes[node] for node in first]), scores[first])
        return scores


class ByNode:
    """A processor with entries per row of the batch, as one copy per row for a batch of one."""

    reads_prefix = reads_tokens = True

    def __init__(self, by_row: Sequence[Processor], ignores_errors: bool = False):
        self.by_row, self.ignores_errors = by_row, ignores_errors

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Call the copy of its row for every node."""
        results = []
        for row, prefix, score in zip(rows, prefixes, scores, strict=True):
            try:
                results.append(self.by_row[row](prefix[None], score[None].clone())[0])
            except Exception:
                if not self.ignores_errors:
                    raise
                results.append(score)
        return torch.stack(results)


class WholeBatch:
    """A processor that may relate rows or remember calls, such as a user's."""

    reads_prefix = reads_tokens = True

    def __init__(self, processor: Processor, num_rows: int):
        self.processor, self.num_rows = processor, num_rows

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Call it once with all rows of the batch, at the same step.

        Rules that are lossy visit other nodes than one of each row. Then it is called once per
        node, with a batch that has the node's prefix in every row.
        """
        if list(rows) == list(range(self.num_rows)):
            return self.processor(torch.stack([*prefixes]), scores)
        results = []
        for row, prefix, score in zip(rows, prefixes, scores, strict=True):
            batch = prefix.expand(self.num_rows, -1).clone()
            results.append(self.processor(batch, score.expand(self.num_rows, -1).clone())[row])
        return torch.stack(results)


def is_stateless(processor: Any) -> bool:
    """Return True for the classes of transformers that remember no calls."""
    kinds = (*PREFIX_FREE, *READS_PREFIX, *STORED_PER_ROW, hf.PrefixConstrainedLogitsProcessor)
    return type(processor) in kinds


def may_fail(processor: Any) -> bool:
    """Return True for a class of transformers that raises an error on some scores.

    The self-hashing watermark indexes with an empty list of floats where none of the forty best
    tokens is on its green list. It is also slow, and drafts need no watermark.
    """
    is_watermark = type(processor) is hf.WatermarkLogitsProcessor
    return is_watermark and processor.seeding_scheme == "selfhash"


def step_of(processor: Any, num_rows: int, is_draft: bool = False) -> Step:
    """Return the step that applies a processor to nodes, by its kind."""
    kind = type(processor)
    if kind in PREFIX_FREE:
        settings = _filter_settings(processor)
        return Filters(processor, settings) if settings else PrefixFree(processor)
    if isinstance(processor, hf.WhisperNoSpeechDetection):
        return FirstStep(processor)
    if kind is hf.PrefixConstrainedLogitsProcessor:
        return ByNode([_constrained(processor, row) for row in range(num_rows)], is_draft)
    entries = row_entries(processor)
    if entries is not None:
        indices = [row * len(entries) // num_rows for row in range(num_rows)]
        return ByNode([_with_entries(processor, entries[i : i + 1]) for i in indices])
    if kind in READS_PREFIX:
        return ByLength(processor)
    return WholeBatch(processor, num_rows)


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


def row_entries(processor: Any) -> Tensor | list[Any] | None:
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
