"""State of a generation: what every round of decoding reads and changes, apart from models."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_spec.backend.device import transfer
from hf_spec.backend.device.clock import Stopwatch, clock_of
from hf_spec.common.outputs import SpecGenerateOutput
from hf_spec.engine.decode.row_tokens import RowTokens
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.streaming import BatchStreamer
from hf_spec.engine.forward.draft_tree import Verdict

# Most tokens that a row may be ahead of the step at which criteria were evaluated. Longer drafts
# are not made: a stop before them would make them useless.
MAX_LEAD = 32
# Most tokens after the prompts to allocate at first: a maximum length may be astronomic.
FIRST_ROOM = 4096


@dataclass(kw_only=True)
class GenerationState(RowTokens):
    """Rows under generation (`RowTokens`), which end where plain `generate()` would end them.

    Rules of single rows are checked after every token. Batch criteria are evaluated for each step
    that all rows have reached; rows that are ahead keep their tokens until then.

    Attributes:
        stop: stop rules of the rows that the call began with.
        pad_token_id: token after the end of rows that are shorter than the longest one.
        processors: the prepared logits processors of `generate()`, for drafters that use them.
        do_sample: True if the rows that the call began with draw their tokens.
        streamer: receives the tokens of each round: one of transformers for a single row, else a
            `BatchStreamer`.
        keep_scores, keep_logits: True if the scores of every token are stored, after and before the
            processors.
        expected_length: expected final length of the rows in tokens, if all of them end with the
            call; 0 if unknown or if other sequences follow in the same rows.
        draws: per row True if its tokens are drawn.
    """

    stop: StopRules
    pad_token_id: int = 0
    processors: Sequence[Any] = ()
    do_sample: bool = False
    streamer: Any = None
    keep_scores: bool = False
    keep_logits: bool = False
    expected_length: int = 0
    draws: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draws = [self.do_sample] * self.num_rows
        self._stops = [self.stop] * self.num_rows
        # Per row: the number of generated tokens at which a rule first held, and the last step for
        # which batch criteria were evaluated.
        self._ends: list[int | None] = [None] * self.num_rows
        self._evaluated = [0] * self.num_rows
        # Scores that criteria have seen, (B, V) per step, and those of ended rows on padding.
        self._shown_scores: list[Tensor] = []
        self._padding_scores: list[list[Tensor]] = [[] for _ in self.tokens]
        # Per row: the number of streamed tokens, and whether its end was streamed.
        self._streamed = [0] * self.num_rows
        self._stream_ended = [False] * self.num_rows
        self._stream_waits = False
        self._stopwatch = Stopwatch(clock_of(self.device))
        self._started = time.perf_counter()

    @classmethod
    def create(
        cls, input_ids: Tensor, attention_mask: Tensor, stop: StopRules, **options: Any
    ) -> GenerationState:
        """Start from (B, L) int64 ids and their mask, padded on the left as in `generate()`.

        The maximum length of the stop rules, if any, sizes `padded_ids`, up to `FIRST_ROOM`;
        `options` are attributes.
        """
        num_rows, width = input_ids.shape
        capacity = min(stop.max_length or 2 * width, width + FIRST_ROOM)
        padded_ids = torch.zeros(num_rows, max(capacity, width + 1) + 1, dtype=torch.long)
        padded_ids[:, :width] = input_ids
        mask = attention_mask.bool().cpu()
        tokens = [padded_ids[row, :width][mask[row]].tolist() for row in range(num_rows)]
        return cls(
            padded_ids=padded_ids,
            prompt_mask=mask,
            tokens=tokens,
            stop=stop,
            device=input_ids.device,
            **options,
        )

    @property
    def drawing(self) -> bool:
        """True if any unfinished row draws its tokens."""
        return any(self.draws[row] for row in self.unfinished)

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

    def is_complete(self, row: int) -> bool:
        """Return True if stop rules ended the row, not an error and not its cancellation."""
        return self.finished[row] and self._ends[row] is not None and row not in self.errors

    def begin(
        self, row: int, sequence: int, prompt: Sequence[int], stop: StopRules, draws: bool = False
    ) -> None:
        """Put the prompt of another sequence of the call into a finished row."""
        self._restart(row, sequence, prompt)
        self._stops[row], self._ends[row], self._evaluated[row] = stop, None, 0
        self._streamed[row], self._stream_ended[row] = 0, False
        self.draws[row] = draws

    def commit(self, verdict: Verdict) -> None:
        """Append each row's new tokens, and truncate rows at their stops."""
        before = {row: self.generated[row] for row in self.unfinished}
        for row in before:
            self._extend(row, verdict)
        self._truncate_at_stops()
        self._release_certain_tokens()
        self.stats.count_round([max(0, self.generated[row] - n) for row, n in before.items()])

    def stream_waiting(self) -> None:
        """Stream the tokens of the last round, if they were left for the time of a forward pass."""
        if self._stream_waits:
            self._stream_all()

    def ends_after(self, row: int, path: Sequence[int]) -> bool:
        """Return True if a rule of single rows ends `row` at the last of its draft tokens."""
        length = self.padded_length(row) + len(path)
        return self._stops[row].end_row(path[-1], length, partial(self.prefix, row, path))

    def padded_prefixes(self, paths: Mapping[int, Sequence[int]]) -> list[Tensor]:
        """Return the (L,) `prefix` of every row: with its path, or ended and filled with padding.

        All rows that have a path have the same length.
        """
        row, path = next(iter(paths.items()))
        batch = self._padded_batch(range(self.num_rows), self.generated[row], self.pad_token_id)
        padding = [self.pad_token_id] * len(path)
        drafted = [paths.get(row, padding) for row in range(self.num_rows)]
        added = torch.tensor(drafted, dtype=torch.long, device=self.device)
        return [*torch.cat([batch, added], dim=1)]

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

    def add_padding_scores(self, scores: Mapping[int, Sequence[Tensor]]) -> None:
        """Add scores, (V,) each, that `missing_scores` listed, and evaluate waiting criteria."""
        self.note_padding_scores(scores)
        self._release_certain_tokens()

    def note_padding_scores(self, scores: Mapping[int, Sequence[Tensor]]) -> None:
        """Add the scores of ended rows at their next positions of padding, (V,) each."""
        for row, row_scores in scores.items():
            self._padding_scores[row] += row_scores

    def finish(self) -> SpecGenerateOutput:
        """Close the streamer and return the sequences in the layout of plain `generate()`."""
        self.end_stream()
        longest = max(self.generated)
        sequences = self.padded_ids[:, : self.prompt_length + longest].clone()
        for row, count in enumerate(self.generated):
            sequences[row, self.prompt_length + count :] = self.pad_token_id
        self.read_clock()
        stats = self.stats
        total = time.perf_counter() - self._started
        stats.other_seconds = total - stats.draft_seconds - stats.verify_seconds
        # As in transformers, whose annotations (LongTensor, tuple[Tensor]) are narrower.
        fields: dict[str, Any] = {
            "sequences": sequences.to(self.device),
            "scores": self._per_step(self.scores, longest) if self.keep_scores else None,
            "logits": self._per_step(self.logits, longest) if self.keep_logits else None,
        }
        return SpecGenerateOutput(**fields, spec_stats=stats)

    def end_stream(self) -> None:
        """Close the streamer."""
        if self.streamer is not None:
            self.streamer.end()

    def output_masks(self, width: int) -> list[Tensor]:
        """Return per row a (width,) bool mask of the output, False for padding of the prompt."""
        generated = torch.ones(width - self.prompt_length, dtype=torch.bool)
        return [torch.cat([mask, generated]) for mask in self.prompt_mask]

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Add the time of the block to `draft_seconds` or `verify_seconds`.

        Work that a device finishes later is added by a later `read_clock`.
        """
        start = self._stopwatch.clock.mark()
        yield
        self._stopwatch.add(part, start, self._stopwatch.clock.mark())
        self.read_clock()

    def read_clock(self) -> None:
        """Update the times in `stats` with all work that has finished."""
        seconds = self._stopwatch.read()
        self.stats.draft_seconds = seconds.get("draft", 0.0)
        self.stats.verify_seconds = seconds.get("verify", 0.0)

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
            try:
                length, padded_ids = self.padded_length(row), partial(self.prefix, row)
                if self._ends[row] is None and stop.end_row(token, length, padded_ids):
                    self._ends[row] = self.generated[row]
            except Exception as error:  # noqa: BLE001 - user code may raise anything
                self.fail(row, error)
            if row in self.errors or (self._ends[row] is not None and stop.pads):
                break
        tree, gained = verdict.tree, self.generated[row] - before
        self.stats.rows[self.sequence[row]].count(
            tree.num_drafted(row), tree.height(row), min(accepted, gained), gained
        )

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

    def _release_certain_tokens(self) -> None:
        """Evaluate the batch criteria, then stream all tokens that stay."""
        self._stream_waits = False
        try:
            self._evaluate_criteria()
            self._stream_waits = self._can_stream_later()
        finally:
            # A criterion may raise: tokens before that step are streamed, as in plain generate().
            if not self._stream_waits:
                self._stream_all()

    def _can_stream_later(self) -> bool:
        """Return True if the device can run the next forward pass meanwhile, and no row ends."""
        ended = [f and not e for f, e in zip(self.finished, self._stream_ended, strict=True)]
        return self.device.type in transfer.ASYNCHRONOUS and not any(ended) and not self.errors

    def _stream_all(self) -> None:
        self._stream_waits = False
        if self.streamer is not None:
            for row, length in enumerate(self._certain_lengths()):
                self._stream(row, length)

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

    def _stream(self, row: int, length: int) -> None:
        """Send the new ones of the first `length` generated tokens of a row, and its end."""
        if self._stream_ended[row]:
            return
        prompt = len(self.tokens[row]) - self.generated[row]
        block = self.tokens[row][prompt + self._streamed[row] : prompt + length]
        ended = self.finished[row] and (length == self.generated[row] or row in self.errors)
        self._streamed[row] += len(block)
        self._stream_ended[row] = ended
        if not isinstance(self.streamer, BatchStreamer):
            if block:
                self.streamer.put(torch.tensor(block))
            return
        if block:
            self.streamer.put_row(self.sequence[row], block)
        if ended:
            self.streamer.end_row(self.sequence[row])

    def _evaluate_criteria(self) -> None:
        """Evaluate the batch criteria of every call for all steps that its rows have reached."""
        for stop in dict.fromkeys(self._stops):
            if not stop.has_batch_criteria:
                continue
            rows = [row for row in range(self.num_rows) if self._stops[row] is stop]
            # Isolated rows have rules of their own, so an error belongs to one row.
            if self.errors.keys().isdisjoint(rows):
                try:
                    self._evaluate_steps(stop, rows)
                except Exception as error:  # noqa: BLE001 - user code may raise anything
                    self.fail(rows[0], error)

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

    @staticmethod
    def _per_step(rows: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
        """Return one (B, V) tensor per step, zeros for rows that ended before."""
        blank = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in rows])
            for step in range(steps)
        )
