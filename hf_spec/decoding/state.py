"""The sequences being generated: tokens, stop rules, streamer, scores and statistics per row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_spec.decoding.streaming import StreamFeed
from hf_spec.decoding.tree import Verdict
from hf_spec.outputs import RowStats, SpecGenerateOutput, SpecStats


class StopRules:
    """Checks a sequence after every single token, also inside an accepted block.

    Length and end-of-sequence checks are integer comparisons. Every other criterion is called as
    plain `generate()` would call it, with one row at a time in its own place of the batch.

    Args:
        criteria: the prepared stopping criteria of `generate()`.
        num_rows: B.

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
        self._others = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                limits = [x for x in (self.max_length, criterion.max_length) if x is not None]
                self.max_length = min(limits)
            elif type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.tolist())
            else:
                self._others.append(criterion)

    @property
    def reads_frames(self) -> bool:
        """Whether any criterion looks at more of a frame than its length."""
        return bool(self._others)

    def ends_sequence(self, token: int) -> bool:
        """Whether `token` ends any sequence; processors and drafters need not look behind it."""
        return token in self._eos

    def __call__(self, row: int, frame: Tensor, token: int, scores: Any) -> bool:
        """Whether `row` ends with its newest token.

        Args:
            row: index of the sequence.
            frame: (L,) int64, the row as plain `generate()` holds it, newest token included;
                on the host unless it is read.
            token: the newest token.
            scores: what plain `generate()` would pass: a tuple of (1, V) tensors, or None.
        """
        if token in self._eos:
            return True
        if self.max_length is not None and frame.shape[0] >= self.max_length:
            return True
        for criterion in self._others:
            verdict = criterion(frame.expand(self.num_rows, -1), scores)
            if isinstance(verdict, Tensor) and verdict.ndim:
                verdict = verdict[row if verdict.shape[0] > 1 else 0]
            if bool(verdict):
                return True
        return False


@dataclass
class GenerationState:
    """Everything a round of decoding reads and changes, apart from models.

    Attributes:
        frames: (B, capacity) int64 on the host; row r up to `frame_length(r)` is what plain
            `generate()` would call its `input_ids`: the prompt with its left padding, then the
            generated tokens.
        frame_mask: (B, L) bool over the prompt on the host, False where it is padding.
        tokens: per row the committed tokens without padding.
        stop: the stop rules.
        processors: the prepared logits processors of `generate()`, for drafters that want them.
        do_sample: whether tokens are drawn or the most likely one is taken.
        pad_token_id: fills rows that end before the longest one.
        streamer: receives the tokens of each round: one of transformers for a single row, else a
            `BatchStreamer`.
        keep_scores, keep_logits: whether the output wants them.
        device: of the user's `input_ids`; processors, stop rules and the output are there.
        finished: per row whether it has ended; such a row may `begin` anew.
        generated: per row how many tokens it has gained.
        sequence: per row which sequence of the call it holds; `stats.rows` is in that order.
        feed: what the streamer was given.
    """

    frames: Tensor
    frame_mask: Tensor
    tokens: list[list[int]]
    stop: StopRules
    processors: Sequence[Any] = ()
    do_sample: bool = False
    pad_token_id: int = 0
    streamer: Any = None
    keep_scores: bool = False
    keep_logits: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stats: SpecStats = field(init=False)
    finished: list[bool] = field(init=False)
    generated: list[int] = field(init=False)
    sequence: list[int] = field(init=False)
    feed: StreamFeed = field(init=False)
    scores: list[list[Tensor]] = field(init=False)
    logits: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.finished = [False] * self.num_rows
        self.generated = [0] * self.num_rows
        self.sequence = list(range(self.num_rows))
        self._stops = [self.stop] * self.num_rows
        self._prompt_lengths = [self.prompt_length] * self.num_rows
        self._ends: list[int | None] = [None] * self.num_rows
        self.feed = StreamFeed(self.streamer, self.num_rows)
        self.scores = [[] for _ in self.tokens]
        self.logits = [[] for _ in self.tokens]
        self.stats = SpecStats([RowStats() for _ in self.tokens])
        self._started = time.perf_counter()

    @classmethod
    def create(
        cls, input_ids: Tensor, attention_mask: Tensor, stop: StopRules, **options: Any
    ) -> GenerationState:
        """Start from a prompt in the layout of plain `generate()`.

        Args:
            input_ids: (B, L) int64, padded on the left.
            attention_mask: (B, L), 0 for padding.
            stop: the stop rules; their maximum length, if any, sizes the frames.
            **options: the remaining attributes.
        """
        num_rows, width = input_ids.shape
        capacity = stop.max_length or 2 * width
        frames = torch.zeros(num_rows, max(capacity, width + 1) + 1, dtype=torch.long)
        frames[:, :width] = input_ids
        mask = attention_mask.bool().cpu()
        tokens = [frames[row, :width][mask[row]].tolist() for row in range(num_rows)]
        return cls(frames, mask, tokens, stop, device=input_ids.device, **options)

    @property
    def num_rows(self) -> int:
        """B, finished rows included."""
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Width of the padded prompt."""
        return self.frame_mask.shape[1]

    @property
    def unfinished(self) -> list[int]:
        """Rows that still generate."""
        return [row for row, done in enumerate(self.finished) if not done]

    def frame_length(self, row: int) -> int:
        """Length of the row as plain `generate()` counts it, padding included."""
        return self._prompt_lengths[row] + self.generated[row]

    def room(self, row: int) -> int:
        """How many tokens the row may still gain, at least 1 for an unfinished row."""
        longest = self._stops[row].max_length
        return self.frames.shape[1] - 1 if longest is None else longest - self.frame_length(row)

    def prefix(self, row: int, path: Sequence[int] = ()) -> Tensor:
        """(L,) int64 on `device`: the frame of `row` followed by the tokens of `path`.

        The path is written behind the committed frame, where the next call overwrites it.
        """
        return self._write(row, path).to(self.device)

    def _write(self, row: int, path: Sequence[int]) -> Tensor:
        start = self.frame_length(row)
        end = start + len(path)
        while end > self.frames.shape[1]:
            self.frames = torch.cat([self.frames, torch.zeros_like(self.frames)], dim=1)
        if path:
            self.frames[row, start:end] = torch.tensor(path)
        return self.frames[row, :end]

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Add the time of the block to `draft_seconds` or `verify_seconds`."""
        start = time.perf_counter()
        yield
        name = f"{part}_seconds"
        setattr(self.stats, name, getattr(self.stats, name) + time.perf_counter() - start)

    def begin(self, row: int, sequence: int, prompt: Sequence[int], stop: StopRules) -> None:
        """Put a new sequence into a finished row.

        Args:
            row: it forgets the sequence that it held.
            sequence: which one of the call this is.
            prompt: token ids, without padding.
            stop: the stop rules, made for a batch of one.
        """
        self._prompt_lengths[row] = self.generated[row] = 0
        self._write(row, prompt)
        self._prompt_lengths[row] = len(prompt)
        self.tokens[row] = list(prompt)
        self.sequence[row] = sequence
        self.finished[row] = False
        self._stops[row], self._ends[row] = stop, None
        self.scores[row], self.logits[row] = [], []
        self.feed.begin(row, sequence)
        missing = sequence + 1 - len(self.stats.rows)
        self.stats.rows += [RowStats() for _ in range(missing)]

    def commit(self, verdict: Verdict) -> None:
        """Append each row's new tokens one by one until it ends."""
        host = verdict.tree.host
        gained = []
        for row in self.unfinished:
            block = verdict.tokens(row)
            for index, token in enumerate(block):
                self.append(row, token)
                if verdict.scores is not None:
                    self.scores[row].append(verdict.scores[row][index])
                if verdict.logits is not None:
                    self.logits[row].append(verdict.logits[row][index])
                seen = tuple(s[None] for s in self.scores[row]) if self.keep_scores else None
                stop = self._stops[row]
                frame = self.frames[row, : self.frame_length(row)]
                if stop.reads_frames:
                    frame = frame.to(self.device)
                if stop(row, frame, token, seen) and self._ends_now(row):
                    self.finished[row] = True
                    block = block[: index + 1]
                    break
            accepted = min(len(verdict.accepted[row]), len(block))
            self.stats.rows[self.sequence[row]].count(
                host.num_drafted(row), host.height(row), accepted, len(block)
            )
            gained.append(len(block))
        self.stats.count_round(gained)
        if self._end_at_once:
            self._end_together()
        if self.streamer is not None:
            self._stream()

    def finish(self) -> SpecGenerateOutput:
        """Close the streamer and return the sequences in the layout of plain `generate()`."""
        self.feed.end()
        longest = max(self.generated)
        sequences = self.frames[:, : self.prompt_length + longest].clone()
        for row, count in enumerate(self.generated):
            sequences[row, self.prompt_length + count :] = self.pad_token_id
        stats = self.stats
        total = time.perf_counter() - self._started
        stats.other_seconds = total - stats.draft_seconds - stats.verify_seconds
        # The annotations of transformers say LongTensor and tuple[Tensor]; it fills in the same.
        fields: dict[str, Any] = {
            "sequences": sequences.to(self.device),
            "scores": self._per_step(self.scores, longest) if self.keep_scores else None,
            "logits": self._per_step(self.logits, longest) if self.keep_logits else None,
        }
        return SpecGenerateOutput(**fields, spec_stats=stats)

    def output_masks(self, width: int) -> list[Tensor]:
        """Per row (width,) bool over the output frame, False for the padding of the prompt."""
        generated = torch.ones(width - self.prompt_length, dtype=torch.bool)
        return [torch.cat([mask, generated]) for mask in self.frame_mask]

    def append(self, row: int, token: int) -> None:
        """Commit one token to `row`."""
        self._write(row, [token])
        self.generated[row] += 1
        self.tokens[row].append(token)

    def _ends_now(self, row: int) -> bool:
        """Note that a stop rule holds for `row`; False if it has to wait for the others."""
        if self._ends[row] is None:
            self._ends[row] = self.generated[row]
        return not self._end_at_once or self.frame_length(row) == self.stop.max_length

    @property
    def _end_at_once(self) -> bool:
        """Whether the rows wait for each other; see `StopRules.pads`."""
        return not self.stop.pads and self.stop.num_rows > 1

    def _stream(self) -> None:
        """Hand on the tokens that are certain to stay."""
        lengths = list(self.generated)
        if self._end_at_once:
            # All rows will be as long as the longest, and those that have not ended go on.
            least = [
                count + 1 if end is None else end
                for count, end in zip(self.generated, self._ends, strict=True)
            ]
            lengths = [min(length, max(least)) for length in lengths]
        for row, length in enumerate(lengths):
            prompt = len(self.tokens[row]) - self.generated[row]
            ended = self.finished[row] and length == self.generated[row]
            self.feed.send(row, self.tokens[row][prompt : prompt + length], ended)

    def _end_together(self) -> None:
        """Cut every row to the place where the last one met a stop rule, once all have."""
        ends = [end for end in self._ends if end is not None]
        if len(ends) < self.num_rows:
            return
        for row, generated in enumerate(self.generated):
            surplus = generated - max(ends)
            if surplus >= 0:
                self.finished[row] = True
                self.generated[row] -= surplus
                self.stats.rows[row].new_tokens -= surplus
                for held in (self.tokens[row], self.scores[row], self.logits[row]):
                    del held[len(held) - surplus :]

    @staticmethod
    def _per_step(rows: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
        blank = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in rows])
            for step in range(steps)
        )
