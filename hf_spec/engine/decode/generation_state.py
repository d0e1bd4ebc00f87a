"""The sequences being generated: tokens, ends, streamer, scores and statistics per row."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_spec.backend.device.clock import Stopwatch, clock_of
from hf_spec.common.outputs import RowStats, SpecGenerateOutput, SpecStats
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.streaming import StreamFeed
from hf_spec.engine.forward.draft_tree import Verdict

logger = logging.getLogger(__name__)

# How many tokens a row may be ahead of the step that criteria are asked about. Drafts that would
# lead further are left out: a stop before them would make them useless.
MAX_LEAD = 32


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
        do_sample: whether tokens are drawn or the most likely one is taken, of the first sequences.
        pad_token_id: fills rows that end before the longest one.
        streamer: receives the tokens of each round: one of transformers for a single row, else a
            `BatchStreamer`.
        keep_scores, keep_logits: whether the output wants them.
        isolated: whether an error in a row's processor, stop rule or draw ends that row alone, as
            sequences of different calls need it; otherwise it is raised.
        expected_length: how long the rows will get, where all of them end with the call; 0 where
            others follow in their place, or nobody knows.
        device: of the user's `input_ids`; processors, stop rules and the output are there.
        finished: per row whether it gains no more tokens; such a row may `begin` again.
        generated: per row how many tokens it has gained.
        sequence: per row which sequence of the call it holds; `stats.rows` is in that order.
        draws: per row whether its tokens are drawn.
        feed: what the streamer was given.
        errors: the errors that ended rows, until these rows `begin` again.
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
    isolated: bool = False
    expected_length: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stats: SpecStats = field(init=False)
    finished: list[bool] = field(init=False)
    generated: list[int] = field(init=False)
    sequence: list[int] = field(init=False)
    draws: list[bool] = field(init=False)
    feed: StreamFeed = field(init=False)
    errors: dict[int, str] = field(init=False)
    scores: list[list[Tensor]] = field(init=False)
    logits: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.finished = [False] * self.num_rows
        self.generated = [0] * self.num_rows
        self.sequence = list(range(self.num_rows))
        self.draws = [self.do_sample] * self.num_rows
        self.errors = {}
        self._stops = [self.stop] * self.num_rows
        self._prompt_lengths = [self.prompt_length] * self.num_rows
        # Per row: at which generated token the first rule held; the last step that criteria were
        # asked about; of every generated token its depth in the draft, 0 if it was not drafted.
        self._ends: list[int | None] = [None] * self.num_rows
        self._asked = [0] * self.num_rows
        self._depths: list[list[int]] = [[] for _ in self.tokens]
        # What criteria were shown of all rows, and what they are shown of rows that have ended.
        self._shown_scores: list[Tensor] = []
        self._padding_scores: list[list[Tensor]] = [[] for _ in self.tokens]
        self.feed = StreamFeed(self.streamer, self.num_rows)
        self.scores = [[] for _ in self.tokens]
        self.logits = [[] for _ in self.tokens]
        self.stats = SpecStats([RowStats() for _ in self.tokens])
        self._stopwatch = Stopwatch(clock_of(self.device))
        self._started = time.perf_counter()

    @classmethod
    def create(
        cls, input_ids: Tensor, attention_mask: Tensor, stop: StopRules, **options: Any
    ) -> GenerationState:
        """Start from a prompt in the layout of plain `generate()`: (B, L) int64 ids and mask.

        It is padded on the left. The maximum length of the stop rules, if any, sizes the frames.
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

    @property
    def drawing(self) -> bool:
        """Whether any row that still generates draws its tokens."""
        return any(self.draws[row] for row in self.unfinished)

    def frame_length(self, row: int) -> int:
        """Length of the row as plain `generate()` counts it, padding included."""
        return self._prompt_lengths[row] + self.generated[row]

    def room(self, row: int) -> int:
        """How many tokens the row may still gain, at least 1 for an unfinished row."""
        stop = self._stops[row]
        room = self.frames.shape[1] - 1
        if stop.max_length is not None:
            room = stop.max_length - self.frame_length(row)
        lead = self.generated[row] - self._asked[row] if stop.asks else 0
        return room if lead <= 0 else min(room, max(1, MAX_LEAD - lead))

    @property
    def draft_limits(self) -> dict[int, int]:
        """Unfinished row -> how many levels its draft may have; the bonus token needs room, too."""
        return {row: self.room(row) - 1 for row in self.unfinished}

    def prefix(self, row: int, path: Sequence[int] = ()) -> Tensor:
        """(L,) int64 on `device`: the frame of `row` followed by the tokens of `path`.

        The path is written after the committed frame, where the next call overwrites it.
        """
        return self._write(row, path).to(self.device)

    def prefixes(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """The `prefix` of every row and path, to keep."""
        # A copy each: those of one row share the space after its committed tokens.
        return [self.prefix(row, path).clone() for row, path in zip(rows, paths, strict=True)]

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
        """Add the time of what is done in the block to `draft_seconds` or `verify_seconds`.

        What a device does later is added when it has; see `read_clock`.
        """
        start = self._stopwatch.clock.mark()
        yield
        self._stopwatch.add(part, start, self._stopwatch.clock.mark())
        self.read_clock()

    def read_clock(self) -> None:
        """Bring the times among the statistics up to date, as far as they are known."""
        seconds = self._stopwatch.read()
        self.stats.draft_seconds = seconds.get("draft", 0.0)
        self.stats.verify_seconds = seconds.get("verify", 0.0)

    def begin(
        self, row: int, sequence: int, prompt: Sequence[int], stop: StopRules, draws: bool = False
    ) -> None:
        """Put a new prompt, of one sequence of the call, into a finished row."""
        self._prompt_lengths[row] = self.generated[row] = 0
        self._write(row, prompt)
        self._prompt_lengths[row] = len(prompt)
        self.tokens[row] = list(prompt)
        self.sequence[row], self.draws[row] = sequence, draws
        self.finished[row] = False
        self._stops[row], self._ends[row], self._asked[row] = stop, None, 0
        self._depths[row] = []
        self.errors.pop(row, None)
        self.scores[row], self.logits[row] = [], []
        self.feed.begin(row, sequence)
        missing = sequence + 1 - len(self.stats.rows)
        self.stats.rows += [RowStats() for _ in range(missing)]

    def fail(self, row: int, error: Exception) -> None:
        """End an isolated row with an error; it commits nothing more. Raise it otherwise."""
        if not self.isolated:
            raise error
        logger.warning("a sequence ended with an error", exc_info=error)
        # As text: a traceback would keep the frames of this step, and with them the KV cache.
        self.errors.setdefault(row, f"{type(error).__name__}: {error}")
        self.finished[row] = True

    @contextmanager
    def containing(self, row: int) -> Iterator[None]:
        """Pass an error that the block raises to `fail`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            self.fail(row, error)

    def commit(self, verdict: Verdict) -> None:
        """Append each row's new tokens and cut off what lies after a stop.

        Rules for single rows are checked after every token. The other criteria are asked about
        each step that all rows have reached; rows that are ahead keep what they have until then.
        """
        before = {row: self.generated[row] for row in self.unfinished}
        for row in before:
            self._extend(row, verdict)
        self._settle()
        self._confirm()
        self.stats.count_round([max(0, self.generated[row] - n) for row, n in before.items()])

    def missing_scores(self) -> dict[int, range]:
        """Per row that has ended the places after its end whose scores criteria wait for.

        Counted in tokens of padding: from 0 on where its last token has to run, too. Asked between
        two rounds.
        """
        if not (self.keep_scores and self.stop.asks and self.stop.pads):
            return {}
        ended = [self._ended_by(row, self._asked[row]) for row in range(self.num_rows)]
        going_on = [n for n, gone in zip(self.generated, ended, strict=True) if not gone]
        wanted = {
            row: range(len(self._padding_scores[row]), min(going_on) - self.generated[row])
            for row, gone in enumerate(ended)
            if gone and going_on
        }
        return {row: places for row, places in wanted.items() if places}

    def show_padding(self, scores: Mapping[int, Sequence[Tensor]]) -> None:
        """Let criteria see the scores of rows that have ended, each (V,), and ask on."""
        for row, found in scores.items():
            self._padding_scores[row] += found
        self._confirm()

    def finish(self) -> SpecGenerateOutput:
        """Close the streamer and return the sequences in the layout of plain `generate()`."""
        self.feed.end()
        longest = max(self.generated)
        sequences = self.frames[:, : self.prompt_length + longest].clone()
        for row, count in enumerate(self.generated):
            sequences[row, self.prompt_length + count :] = self.pad_token_id
        self.read_clock()
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

    def append(self, row: int, token: int, depth: int = 0) -> None:
        """Commit one token to `row`; `depth` is its place in the draft, 0 if it was not drafted."""
        self._write(row, [token])
        self.generated[row] += 1
        self.tokens[row].append(token)
        self._depths[row].append(depth)

    def _extend(self, row: int, verdict: Verdict) -> None:
        """Append what the verdict gives to `row`, and note where a rule for single rows holds."""
        stop, before = self._stops[row], self.generated[row]
        accepted = len(verdict.accepted[row])
        for index, token in enumerate(verdict.tokens(row)):
            self.append(row, token, index + 1 if index < accepted else 0)
            if verdict.scores is not None:
                self.scores[row].append(verdict.scores[row][index])
            if verdict.logits is not None:
                self.logits[row].append(verdict.logits[row][index])
            with self.containing(row):
                if self._ends[row] is None and stop.end_row(self._newest_frame(row), token):
                    self._ends[row] = self.generated[row]
            if row in self.errors or (self._ends[row] is not None and stop.pads):
                break
        tree, gained = verdict.tree, self.generated[row] - before
        self.stats.rows[self.sequence[row]].count(
            tree.num_drafted(row), tree.height(row), min(accepted, gained), gained
        )

    def _newest_frame(self, row: int) -> Tensor:
        """(L,) int64: the row as plain `generate()` holds it; on the host if nobody reads it."""
        frame = self.frames[row, : self.frame_length(row)]
        return frame.to(self.device) if self._stops[row].reads_frames else frame

    def _confirm(self) -> None:
        """Ask the criteria as far as all is there, then hand on what is certain."""
        try:
            for stop in dict.fromkeys(self._stops):
                rows = [row for row in range(self.num_rows) if self._stops[row] is stop]
                # Isolated rows have rules of their own, so an error belongs to one row.
                if stop.asks and self.errors.keys().isdisjoint(rows):
                    with self.containing(rows[0]):
                        self._ask(stop, rows)
        finally:
            # A criterion may raise: what it let pass before is out, as in plain generate().
            if self.streamer is not None:
                self._stream()

    def _ask(self, stop: StopRules, rows: Sequence[int]) -> None:
        """Ask the criteria of one call about every step that all of its rows have reached."""
        while self._reached(stop, rows, step := self._asked[rows[0]] + 1):
            scores = self._scores_until(rows, step) if self.keep_scores else None
            ended = stop.ask(self._frames_at(rows, step), scores)
            for row, ends in zip(rows, ended, strict=True):
                self._asked[row] = step
                if ends and not self._ended_by(row, step):
                    self._ends[row] = step
            if any(ended):
                self._settle()

    def _reached(self, stop: StopRules, rows: Sequence[int], step: int) -> bool:
        """Whether plain `generate()` takes this step and all its tokens are there."""
        ended = {row for row in rows if self._ended_by(row, step - 1)}
        # Rows that have ended must lack no scores that a criterion may read.
        scored = {r for r in ended if not self.keep_scores or len(self._all_scores(r)) >= step}
        return len(ended) < len(rows) and all(
            self.generated[row] >= step or (stop.pads and row in scored) for row in rows
        )

    def _all_scores(self, row: int) -> list[Tensor]:
        return self.scores[row] + self._padding_scores[row]

    def _ended_by(self, row: int, step: int) -> bool:
        """Whether a rule held for `row` within its first `step` tokens."""
        end = self._ends[row]
        return end is not None and end <= step

    def _frames_at(self, rows: Sequence[int], step: int) -> Tensor:
        """(rows, L) int64: what plain `generate()` holds after a step, rows that ended padded."""
        prompt = self._prompt_lengths[rows[0]]
        frames = self.frames[list(rows), : prompt + step]
        for place, row in enumerate(rows):
            if self.generated[row] < step:
                frames[place, prompt + self.generated[row] :] = self.pad_token_id
        return frames.to(self.device)

    def _scores_until(self, rows: Sequence[int], step: int) -> tuple[Tensor, ...]:
        """The scores of the first steps, each (rows, V)."""
        held = [self._all_scores(row) for row in rows]
        for index in range(len(self._shown_scores), step):
            together = torch.stack([scores[index] for scores in held])
            self._shown_scores.append(together)
            for row, scores in zip(rows, together, strict=True):
                if index < len(self.scores[row]):
                    # One copy in memory, not two.
                    self.scores[row][index] = scores
        return tuple(self._shown_scores)

    def _settle(self) -> None:
        """Cut every row at its end, as far as that is known."""
        bound = self._common_end() if self._end_at_once else None
        for row, end in enumerate(self._ends):
            last = bound if self._end_at_once else end
            if last is not None and self.generated[row] >= last:
                self._cut(row, last)
                self.finished[row] = True

    def _common_end(self) -> int | None:
        """Where all rows end if they wait for each other: where the last one met a rule."""
        ends = [end for end in self._ends if end is not None]
        if len(ends) == self.num_rows:
            return max(ends)
        # Nobody knows yet, but none goes on from here.
        longest = self.stop.max_length
        return None if longest is None else longest - self.prompt_length

    def _cut(self, row: int, length: int) -> None:
        """Drop the tokens of `row` after its first `length`, and what was kept with them."""
        surplus = self.generated[row] - length
        self.generated[row] = length
        depths = self._depths[row]
        dropped = depths[len(depths) - surplus :]
        self.stats.rows[self.sequence[row]].discount(dropped)
        for held in (self.tokens[row], depths, self.scores[row], self.logits[row]):
            del held[len(held) - surplus :]

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
        for row, certain in enumerate(lengths):
            length = min(certain, self._asked[row]) if self._stops[row].asks else certain
            prompt = len(self.tokens[row]) - self.generated[row]
            ended = self.finished[row] and (length == self.generated[row] or row in self.errors)
            self.feed.send(row, self.tokens[row][prompt : prompt + length], ended)

    @staticmethod
    def _per_step(rows: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
        blank = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in rows])
            for step in range(steps)
        )
