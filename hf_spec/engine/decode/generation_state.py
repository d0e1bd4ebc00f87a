"""State of a generation: what every round of decoding reads and changes, apart from models."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_spec.backend.device.clock import Stopwatch, clock_of
from hf_spec.common.outputs import SpecGenerateOutput
from hf_spec.engine.decode.stopping import StoppingRows, StopRules
from hf_spec.engine.decode.streaming import StreamFeed
from hf_spec.engine.forward.draft_tree import Verdict


@dataclass(kw_only=True)
class GenerationState(StoppingRows):
    """Rows under generation, with their streamer, times and output.

    The base classes hold the tokens (`RowTokens`) and end the rows (`StoppingRows`).

    Attributes:
        processors: the prepared logits processors of `generate()`, for drafters that use them.
        do_sample: True if the rows that the call began with draw their tokens.
        streamer: receives the tokens of each round: one of transformers for a single row, else a
            `BatchStreamer`.
        keep_logits: True if the output has the logits of every token.
        expected_length: expected final length of the rows in tokens, if all of them end with the
            call; 0 if unknown or if other sequences follow in the same rows.
        draws: per row True if its tokens are drawn.
        stream: the tokens that the streamer has received.
    """

    processors: Sequence[Any] = ()
    do_sample: bool = False
    streamer: Any = None
    keep_logits: bool = False
    expected_length: int = 0
    draws: list[bool] = field(init=False)
    stream: StreamFeed = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draws = [self.do_sample] * self.num_rows
        self.stream = StreamFeed(self.streamer, self.num_rows)
        self._stopwatch = Stopwatch(clock_of(self.device))
        self._started = time.perf_counter()

    @classmethod
    def create(
        cls, input_ids: Tensor, attention_mask: Tensor, stop: StopRules, **options: Any
    ) -> GenerationState:
        """Start from (B, L) int64 ids and their mask, padded on the left as in `generate()`.

        The maximum length of the stop rules, if any, sizes `padded_ids`; `options` are attributes.
        """
        num_rows, width = input_ids.shape
        capacity = stop.max_length or 2 * width
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

    def begin(
        self, row: int, sequence: int, prompt: Sequence[int], stop: StopRules, draws: bool = False
    ) -> None:
        """Put the prompt of another sequence of the call into a finished row."""
        self._restart(row, sequence, prompt)
        self._set_rules(row, stop)
        self.draws[row] = draws
        self.stream.begin(row, sequence)

    def commit(self, verdict: Verdict) -> None:
        """Append each row's new tokens, and truncate rows at their stops."""
        before = {row: self.generated[row] for row in self.unfinished}
        for row in before:
            self._extend(row, verdict)
        self._truncate_at_stops()
        self._release_certain_tokens()
        self.stats.count_round([max(0, self.generated[row] - n) for row, n in before.items()])

    def add_padding_scores(self, scores: Mapping[int, Sequence[Tensor]]) -> None:
        """Add scores, (V,) each, that `missing_scores` listed, and evaluate waiting criteria."""
        for row, row_scores in scores.items():
            self._padding_scores[row] += row_scores
        self._release_certain_tokens()

    def finish(self) -> SpecGenerateOutput:
        """Close the streamer and return the sequences in the layout of plain `generate()`."""
        self.stream.end()
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

    def _release_certain_tokens(self) -> None:
        """Evaluate the batch criteria, then stream all tokens that stay."""
        try:
            self._evaluate_criteria()
        finally:
            # A criterion may raise: tokens before that step are streamed, as in plain generate().
            if self.streamer is not None:
                self._stream_tokens()

    def _stream_tokens(self) -> None:
        for row, length in enumerate(self._certain_lengths()):
            prompt = len(self.tokens[row]) - self.generated[row]
            ended = self.finished[row] and (length == self.generated[row] or row in self.errors)
            self.stream.send(row, self.tokens[row][prompt : prompt + length], ended)

    @staticmethod
    def _per_step(rows: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
        """Return one (B, V) tensor per step, zeros for rows that ended before."""
        blank = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in rows])
            for step in range(steps)
        )
