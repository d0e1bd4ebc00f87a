"""What a speculative `generate()` returns beside the tokens: counts and times of the decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

# Of the depths of a draft, in a printed table.
SHOWN_POSITIONS = 5
# What a dictionary of statistics has beside the fields.
DERIVED = (
    "new_tokens",
    "rounds",
    "drafted_tokens",
    "accepted_tokens",
    "tau",
    "acceptance",
    "tokens_per_second",
    "seconds",
    "drafted_by_position",
    "accepted_by_position",
)


@dataclass
class RowStats:
    """Counts of one sequence; see `SpecStats` for the meaning of each name."""

    target_forwards: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    new_tokens: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Accepted draft tokens per target forward, without the bonus token."""
        return self.accepted_tokens / max(self.target_forwards, 1)

    @property
    def accepted_length(self) -> float:
        """Tokens gained per target forward, bonus tokens included (see `SpecStats`)."""
        return self.new_tokens / max(self.target_forwards, 1)

    def __str__(self) -> str:
        return _table(_counts(self, self.accepted_length))

    def count(self, drafted: int, depth: int, accepted: int, gained: int) -> None:
        """Add a round.

        Args:
            drafted: nodes of the draft.
            depth: its levels.
            accepted: nodes that were kept.
            gained: tokens that the row is longer by: these and the bonus token, if none was cut.
        """
        self.target_forwards += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.new_tokens += gained
        for by_position, reached in (
            (self.drafted_by_position, depth),
            (self.accepted_by_position, accepted),
        ):
            by_position.extend([0] * (reached - len(by_position)))
            for position in range(reached):
                by_position[position] += 1

    def discount(self, depths: Iterable[int]) -> None:
        """Take back tokens that a stop cut off after their round was counted.

        Args:
            depths: of each its place in the draft, counted from 1; 0 for a bonus token.
        """
        for depth in depths:
            self.new_tokens -= 1
            if depth:
                self.accepted_tokens -= 1
                self.accepted_by_position[depth - 1] -= 1
        while self.accepted_by_position and not self.accepted_by_position[-1]:
            self.accepted_by_position.pop()


@dataclass
class SpecStats:
    """Counts and times of one `generate()` call, or of several added up; printed, a small table.

    The EMS-SD paper calls what a row gains in a step, bonus token included, its acceptance length;
    `accepted_length_mean`, `accepted_length_min` and `padding_ratio` are in that measure (Ni et al.
    2024, arXiv 2405.07542, equations 5 and 8 to 10). `tau` leaves the bonus token out.

    Attributes:
        rows: counts of each sequence.
        target_forwards: forward passes of the target model, prompt included.
        target_tokens: tokens that passed the target's linear layers, prompts and padding included.
        target_padding: how many of these were padding.
        uneven_tokens: by how much rows fell behind the row that gained most, over all steps.
        graph_replays: how many of the target's forwards were replayed as CUDA graphs.
        graph_captures: graphs recorded for that; those of earlier calls serve too.
        graph_refusal: why its forwards cannot be recorded, or None.
        draft_forwards: forward passes of a draft model or head.
        draft_seconds: time spent proposing tokens.
        verify_seconds: time inside the target model's forward passes.
        other_seconds: everything else (packing, verdicts, stop rules, key-value moves).
        counters: what the method counts beside that, by name; see its drafter.
    """

    rows: list[RowStats]
    target_forwards: int = 0
    target_tokens: int = 0
    target_padding: int = 0
    uneven_tokens: int = 0
    graph_replays: int = 0
    graph_captures: int = 0
    graph_refusal: str | None = None
    draft_forwards: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        times = (self.draft_seconds, self.verify_seconds, self.other_seconds)
        parts = zip(("draft", "target", "other"), times, strict=True)
        lines = _counts(self, self.accepted_length_mean)
        if len(self.rows) > 1:
            lines.insert(1, ("rows", str(len(self.rows)), ""))
        if self.target_padding:
            share = self.target_padding / self.target_tokens
            lines.append(("padding", str(self.target_padding), f"{share:.0%} of the target's work"))
        if self.graph_replays:
            lines.append(("graph replays", str(self.graph_replays), "of the target's forwards"))
        if self.draft_forwards:
            lines.append(("draft forwards", str(self.draft_forwards), ""))
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts)
        shown += f"; {self.tokens_per_second:.1f} tokens per second"
        lines.append(("seconds", f"{self.seconds:.2f}", shown))
        lines += [(name.replace("_", " "), str(n), "") for name, n in self.counters.items()]
        return _table(lines)

    def __add__(self, other: SpecStats) -> SpecStats:
        """The sequences and counts of both."""
        sums: dict[str, Any] = {
            part.name: getattr(self, part.name) + getattr(other, part.name)
            for part in fields(self)
            if part.name not in {"counters", "graph_refusal"}
        }
        sums["graph_refusal"] = self.graph_refusal or other.graph_refusal
        counters = Counter(self.counters)
        counters.update(other.counters)
        return SpecStats(**sums, counters=dict(counters))

    def to_dict(self) -> dict[str, Any]:
        """Every count, time and rate but those of single rows, as JSON values."""
        own = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "rows"}
        return {**own, **{name: getattr(self, name) for name in DERIVED}}

    @property
    def rounds(self) -> int:
        """Drafts that were judged, all rows together; one that proposes nothing is one, too."""
        return sum(row.target_forwards for row in self.rows)

    @property
    def seconds(self) -> float:
        """Time of it all."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.accepted_tokens / max(self.drafted_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second; 0 before there are any."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def drafted_tokens(self) -> int:
        """Draft tokens sent to the target, all rows together."""
        return sum(row.drafted_tokens for row in self.rows)

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that became part of the output, all rows together."""
        return sum(row.accepted_tokens for row in self.rows)

    @property
    def tau(self) -> float:
        """Accepted draft tokens per target forward and row, without the bonus token."""
        return self.accepted_tokens / max(self.rounds, 1)

    @property
    def new_tokens(self) -> int:
        """Tokens generated, all rows together."""
        return sum(row.new_tokens for row in self.rows)

    @property
    def accepted_length_mean(self) -> float:
        """Mean of the rows' accepted lengths, 1 without accepted drafts."""
        return sum(self._accepted_lengths) / max(len(self.rows), 1)

    @property
    def accepted_length_min(self) -> float:
        """Least of the rows' accepted lengths, which decides when a batch is done."""
        return min(self._accepted_lengths, default=0.0)

    @property
    def padding_ratio(self) -> float:
        """Padding that an aligned cache needs per token generated, whatever was padded here."""
        return self.uneven_tokens / max(self.new_tokens, 1)

    @property
    def _accepted_lengths(self) -> list[float]:
        return [row.accepted_length for row in self.rows]

    def count_round(self, gained: list[int]) -> None:
        """Add a step in which each unfinished row gained so many tokens."""
        self.uneven_tokens += len(gained) * max(gained, default=0) - sum(gained)

    @property
    def accepted_by_position(self) -> list[int]:
        """How often the draft token at depth 1, 2, ... was accepted, all rows together."""
        return _add_up([row.accepted_by_position for row in self.rows])

    @property
    def drafted_by_position(self) -> list[int]:
        """How often a draft reached depth 1, 2, ..., all rows together."""
        return _add_up([row.drafted_by_position for row in self.rows])


_collecting: ContextVar[list[SpecStats] | None] = ContextVar("collecting", default=None)


@contextmanager
def collect_stats() -> Iterator[list[SpecStats]]:
    """A list that gains the statistics of every generation in the block, in this thread.

    For those whose output does not come back as it was made: in pipelines, and in Whisper's
    `generate()`, which may make several of one recording. `sum(found, SpecStats([]))` adds them up.
    """
    found: list[SpecStats] = []
    token = _collecting.set(found)
    try:
        yield found
    finally:
        _collecting.reset(token)


def publish_stats(stats: SpecStats) -> None:
    """Add the statistics of a generation that has ended to those collected."""
    found = _collecting.get()
    if found is not None:
        found.append(stats)


Line = tuple[str, str, str]


def _counts(stats: RowStats | SpecStats, accepted_length: float) -> list[Line]:
    """Label, value and note of what a row and a whole call both count."""
    drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
    lines = [
        ("new tokens", str(stats.new_tokens), ""),
        ("target forwards", str(stats.target_forwards), f"{accepted_length:.2f} tokens each"),
        ("draft tokens", str(drafted), ""),
    ]
    if drafted:
        reached = zip(stats.accepted_by_position, stats.drafted_by_position, strict=False)
        shares = ", ".join(f"{part / whole:.0%}" for part, whole in list(reached)[:SHOWN_POSITIONS])
        by_position = f"; by position: {shares}" if shares else ""
        note = f"{accepted / drafted:.0%} of them{by_position}"
        lines.append(("accepted", str(accepted), note))
        lines.append(("tau", f"{stats.tau:.2f}", "accepted draft tokens per target forward"))
    return lines


def _table(lines: Sequence[Line]) -> str:
    """Lines with their labels and values in columns."""
    label_len, value_len = (max(len(line[column]) for line in lines) for column in (0, 1))
    return "\n".join(
        f"{label:<{label_len}}  {value:>{value_len}}  {note}".rstrip()
        for label, value, note in lines
    )


def _add_up(counts: list[list[int]]) -> list[int]:
    return [sum(position) for position in zip_longest(*counts, fillvalue=0)]


@dataclass
class SpecGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the decoding statistics.

    `scores` and `logits` have one (B, V) tensor per generated token, as in plain `generate()`;
    rows that finished earlier hold zeros there.
    """

    spec_stats: SpecStats | None = None


class SpecEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for encoder-decoders.

    The statistics are no item of it: Whisper's `generate()` takes all items apart by rows, and
    makes its own output of them, without statistics; `collect_stats` has them.
    """

    spec_stats: SpecStats | None = None

    @classmethod
    def of(cls, output: SpecGenerateOutput) -> SpecEncoderDecoderOutput:
        """What a decoder-only model would have returned, as that of an encoder-decoder."""
        named = {name: value for name, value in output.items() if name != "spec_stats"}
        made = cls(**named)
        made.spec_stats = output.spec_stats
        return made


@dataclass
class SpecRequestOutput(GenerationOutput):
    """One sequence of `generate_batch()`: transformers' own output with the counts of the sequence.

    `logprobs` stays empty; `lifespan` says when the sequence took its place in the batch and when
    it ended, in seconds of `time.perf_counter()`. As in transformers, an error in a processor, a
    stopping criterion or a draw of this sequence ends it alone: `error` has its text, `status` is
    `FAILED`, and `generated_tokens` has what was committed before that round.
    """

    status: RequestStatus = RequestStatus.FINISHED
    spec_stats: RowStats | None = None


class SpecBatchOutput(dict[str, SpecRequestOutput]):
    """What `generate_batch()` returns with a strategy: outputs by request id, as the prompts came.

    Attributes:
        spec_stats: counts and times of the whole call; `rows` in the same order.
    """

    def __init__(self, outputs: Iterable[SpecRequestOutput], spec_stats: SpecStats):
        super().__init__((output.request_id, output) for output in outputs)
        self.spec_stats = spec_stats
