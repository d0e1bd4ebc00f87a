"""Logits processors over the nodes of a tree, exact for each node's own prefix.

Four kinds, in the order the user gave them:

* those that never read the prefix run once over all nodes;
* transformers' own that read the prefix run once per prefix length, nodes as rows; where such a
  class holds something per row of the batch, every row gets a copy that holds its share;
* the one that looks for silence in Whisper's first step sees the roots of that step together, and
  changes nothing;
* any other class, a user's above all, is called as plain `generate()` calls it: with the whole
  batch, the node's prefix in the row's own place. Rows advance at different speeds, so each has a
  copy of its own; it is called once for every token of the output and in order, which keeps
  classes that remember earlier calls exact too. (A function cannot be copied: what it remembers
  outside itself is shared by all rows, so keep such a memory in a class.)

Where rows hold sequences of different calls, each row has a list of its own (`RowProcessors`).
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.engine.decode.copies import own_copy

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

# Of these, the ones that go by scores alone, whichever tokens they are of.
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

# Classes that hold one entry per row of the batch, and the attribute that holds it.
HELD_PER_ROW = {
    hf.RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",
    hf.EncoderRepetitionPenaltyLogitsProcessor: "encoder_input_ids",
    hf.EncoderNoRepeatNGramLogitsProcessor: "generated_ngrams",
}

# Of these, the ones whose entry serves all rows that `num_return_sequences` makes of one prompt.
SHARED_BY_COPIES = (
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
)

REFUSED = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale runs a second forward "
    "of the model for every token of the output, which a draft tree cannot share",
    hf.ClassifierFreeGuidanceLogitsProcessor: "it takes two rows of scores for one of tokens",
    hf.DiaClassifierFreeGuidanceLogitsProcessor: "it takes two rows of scores for one of tokens",
    hf.DiaEOSChannelFilterLogitsProcessor: "its rows are channels that depend on each other",
    hf.DiaEOSDelayPatternLogitsProcessor: "its rows are channels that depend on each other",
}


def check_processors(processors: Sequence[Any], num_rows: int) -> None:
    """Refuse processors that cannot be made exact.

    Raises:
        OptionError: if something in the list cannot be called with token ids and scores.
        UnsupportedError: names the processor and the reason.
    """
    for processor in processors:
        # The same test as in transformers' LogitsProcessorList, which would fail in mid-generation.
        if not callable(processor) or len(inspect.signature(processor.__call__).parameters) > 2:
            raise OptionError(
                f"logits_processor holds {processor!r}, which cannot be called with "
                "(input_ids, scores); pass instances of LogitsProcessor or functions of those two"
            )
        reason = next((why for kind, why in REFUSED.items() if isinstance(processor, kind)), None)
        held = _held(processor)
        shared = isinstance(processor, SHARED_BY_COPIES)
        if held is not None and (num_rows % len(held) if shared else num_rows - len(held)):
            reason = f"it holds {len(held)} rows for a batch of {num_rows}"
        if reason is not None:
            raise UnsupportedError(
                f"{type(processor).__name__} cannot be used with spec_strategy: {reason}; "
                "leave it out or call generate() without spec_strategy"
            )


class NodeProcessors:
    """The processors of one `generate()` call, applied to nodes of trees.

    `stateless_only` leaves the third kind out, and what raises errors on some scores: for draft
    models, whose scores may differ from the target's in any way, and whose calls must not disturb
    what a class remembers.
    """

    def __init__(self, processors: Sequence[Any], num_rows: int, stateless_only: bool = False):
        self.num_rows = num_rows
        self._steps: list[Any] = []
        for processor in processors:
            if isinstance(processor, RowProcessors):
                self._steps.append(processor.step(stateless_only))
            elif not stateless_only or (_is_known(processor) and not _may_fail(processor)):
                self._steps.append(_step(processor, num_rows))

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def idle(self) -> bool:
        """Whether they leave all scores alone, until a row begins with some of its own."""
        return not any(not isinstance(step, _OfRow) or any(step.lists) for step in self._steps)

    @property
    def reads_prefix(self) -> bool:
        """Whether any processor needs to know the tokens before a node."""
        return any(step.reads_prefix for step in self._steps)

    @property
    def reads_tokens(self) -> bool:
        """Whether any processor needs to know which token a score is of."""
        return any(step.reads_tokens for step in self._steps)

    def __call__(
        self,
        rows: Sequence[int],
        prefixes: Sequence[Tensor] | None,
        scores: Tensor,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Process (M, V) float32 scores of nodes in sequences `rows`, changed in place maybe.

        A prefix is (L,) int64, the frame up to and including the node; there are none needed where
        `reads_prefix` is False. Where (R,) int64 tokens are `wanted`, the others having the score
        -inf, (M, R) is returned; where no step `reads_tokens` it is taken, too.
        """
        whole = wanted is not None and self.reads_tokens
        for place, step in enumerate(self._steps):
            if whole and not any(later.reads_tokens for later in self._steps[place:]):
                scores, whole = scores[:, wanted], False
            scores = step(rows, prefixes or [], scores)
        return scores[:, wanted] if whole else scores


class RowProcessors:
    """A list of processors per row, for rows that hold sequences of different calls.

    It stands in a list of processors for all that `generate()` would have prepared. `begin` may
    follow at any time: what was made from that list knows of it.

    An error of a row's processor is passed to `on_error` and leaves the scores of that row as they
    are; other rows are processed as usual.
    """

    def __init__(self, num_rows: int, on_error: Callable[[int, Exception], None]):
        self.all = [NodeProcessors([], 1) for _ in range(num_rows)]
        self.stateless = list(self.all)
        self._on_error = on_error

    def step(self, stateless_only: bool) -> _OfRow:
        """Return what applies each row's own list, whatever the row holds at that time."""
        if stateless_only:
            # Draft scores may be any. A processor that fails on them alone costs acceptance, not
            # the row; one that fails on the target's scores is reported by the verifier.
            return _OfRow(self.stateless, lambda row, error: None)
        return _OfRow(self.all, self._on_error)

    def begin(self, row: int, processors: Sequence[Any]) -> None:
        """Give a row the processors of its new sequence, as prepared for a batch of one."""
        own = [p if _is_known(p) else own_copy(p, "several sequences") for p in processors]
        self.all[row] = NodeProcessors(own, 1)
        self.stateless[row] = NodeProcessors(own, 1, stateless_only=True)


class _OfRow:
    """The processors of each row's own list."""

    def __init__(self, lists: Sequence[NodeProcessors], on_error: Callable[[int, Exception], None]):
        self.lists, self._on_error = lists, on_error

    @property
    def reads_prefix(self) -> bool:
        return any(one.reads_prefix for one in self.lists)

    @property
    def reads_tokens(self) -> bool:
        return any(one.reads_tokens for one in self.lists)

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        groups: dict[int, list[int]] = defaultdict(list)
        for node, row in enumerate(rows):
            if self.lists[row]:
                groups[row].append(node)
        for row, nodes in groups.items():
            mine = [prefixes[node] for node in nodes] if prefixes else None
            try:
                scores[nodes] = self.lists[row]([0] * len(nodes), mine, scores[nodes])
            except Exception as error:  # noqa: BLE001 - a row's error must not reach other rows
                self._on_error(row, error)
        return scores


class _PrefixFree:
    reads_prefix = False

    def __init__(self, processor: Processor):
        self.processor = processor
        self.reads_tokens = type(processor) not in TOKEN_FREE

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        unused = torch.zeros(len(rows), 1, dtype=torch.long, device=scores.device)
        return self.processor(unused, scores)


class _ByLength:
    """One call for all nodes with prefixes of the same length."""

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


class _ByRow:
    """One call per node, with the copy of the processor that belongs to the node's row."""

    reads_prefix = reads_tokens = True

    def __init__(self, copies: Sequence[Processor]):
        self.copies = copies

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        results = [
            self.copies[row](prefix[None], scores[node : node + 1])
            for node, (row, prefix) in enumerate(zip(rows, prefixes, strict=True))
        ]
        return torch.cat(results)


class _FirstStep:
    """Transformers' class that looks at the first step of the whole batch and changes nothing."""

    reads_prefix = reads_tokens = True

    def __init__(self, processor: hf.WhisperNoSpeechDetection):
        self.processor = processor

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        begin = self.processor.begin_index
        first = [node for node, prefix in enumerate(prefixes) if len(prefix) == begin]
        if first:
            self.processor(torch.stack([prefixes[node] for node in first]), scores[first])
        return scores


class _AsBatch:
    """One call per node, as a batch that shows the node's prefix in every place."""

    reads_prefix = reads_tokens = True

    def __init__(self, processor: Any, num_rows: int):
        self.num_rows = num_rows
        spares = (own_copy(processor, f"{num_rows} rows") for _ in range(num_rows - 1))
        self.copies = [processor, *spares]

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        results = []
        for node, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
            frame = prefix.expand(self.num_rows, -1).clone()
            batch = scores[node].expand(self.num_rows, -1).clone()
            results.append(self.copies[row](frame, batch)[row])
        return torch.stack(results)


def _is_known(processor: Any) -> bool:
    kinds = (*PREFIX_FREE, *READS_PREFIX, *HELD_PER_ROW, hf.PrefixConstrainedLogitsProcessor)
    return type(processor) in kinds


def _may_fail(processor: Any) -> bool:
    """Whether transformers' class raises an error on some scores; the draft model's need no mark.

    The watermark that seeds by the candidates themselves indexes with an empty list of floats
    where none of the forty best tokens is on its green list. Trying them takes long besides.
    """
    marks = type(processor) is hf.WatermarkLogitsProcessor
    return marks and processor.seeding_scheme == "selfhash"


def _step(processor: Any, num_rows: int) -> Any:
    kind = type(processor)
    if kind in PREFIX_FREE:
        return _PrefixFree(processor)
    if isinstance(processor, hf.WhisperNoSpeechDetection):
        return _FirstStep(processor)
    if kind is hf.PrefixConstrainedLogitsProcessor:
        return _ByRow([_constrained(processor, row) for row in range(num_rows)])
    held = _held(processor)
    if held is not None:
        places = [row * len(held) // num_rows for row in range(num_rows)]
        return _ByRow([_share(processor, held[place : place + 1]) for place in places])
    if kind in READS_PREFIX:
        return _ByLength(processor)
    return _AsBatch(processor, num_rows)


def _held(processor: Any) -> Tensor | list[Any] | None:
    """What the processor holds per row of the batch, if anything."""
    attribute = HELD_PER_ROW.get(type(processor))
    held = getattr(processor, attribute) if attribute else None
    return held if isinstance(held, (Tensor, list)) else None


def _share(processor: Any, held: Tensor | list[Any]) -> Any:
    share = copy.copy(processor)
    setattr(share, HELD_PER_ROW[type(processor)], held)
    if hasattr(share, "batch_size"):
        share.batch_size = 1
    return share


def _constrained(processor: hf.PrefixConstrainedLogitsProcessor, row: int) -> Processor:
    allowed = processor._prefix_allowed_tokens_fn
    return hf.PrefixConstrainedLogitsProcessor(
        lambda _, ids: allowed(row // processor._num_beams, ids), 1
    )
