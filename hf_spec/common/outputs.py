"""Outputs of speculative generation and their statistics."""

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

# Draft positions in a printed table.
SHOWN_POSITIONS = 5
# Properties that `SpecStats.to_dict` adds to the fields.
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
        """Accepted draft tokens per target forward pass, without bonus tokens."""
        return self.accepted_tokens / max(self.target_forwards, 1)

    @property
    def accepted_length(self) -> float:
        """Tokens gained per target forward pass, with bonus tokens (see `SpecStats`)."""
        return self.new_tokens / max(self.target_forwards, 1)

    def __str__(self) -> str:
        return _table(_counts(self, self.accepted_length))

    def count(self, drafted: int, depth: int, accepted: int, gained: int) -> None:
        """Add a round, with the new tokens after a stop was applied."""
        self.target_forwards += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.new_tokens += gained
        # In place: this runs for every row of every round.
        for by_position, reached in (
            (self.drafted_by_position, depth),
            (self.accepted_by_position, accepted),
        ):
            by_position.extend([0] * (reached - len(by_position)))
            for position in range(reached):
                by_position[position] += 1

    def discount(self, depths: Iterable[int]) -> None:
        """Subtract tokens that a stop removed after their round was counted.

        `depths` are their positions in the draft, from 1; 0 for a bonus token.
        """
        for depth in depths:
            self.new_tokens -= 1
            if depth:
                self.accepted_tokens -= 1
                self.accepted_by_position[depth - 1] -= 1
        while self.accepted_by_position and not self.accepted_by_position[-1]:
            self.accepted_by_position.pop()


# Counts of `SpecStats` whose sum is the largest of both.
MAXIMA = ("kv_pool_bytes", "packed_weight_bytes")


@dataclass
class SpecStats:
    """Counts and times of one `generate()` call or a sum of several; `str()` is a small table.

    `accepted_length_mean`, `accepted_length_min` and `padding_ratio` use the acceptance length of
    EMS-SD, the tokens that a row gains in a step including the bonus token (Ni et al. 2024, arXiv
    2405.07542, equations 5 and 8 to 10). `tau` does not include bonus tokens.

    Attributes:
        rows: counts of each sequence.
        target_forwards: forward passes of the target model, including the prefill.
        target_tokens: tokens in the target's linear layers, including prompts and padding.
        target_padding: padding tokens among these.
        uneven_tokens: sum over steps and rows of the difference to the row that gained most.
        graph_replays: target forward passes replayed as CUDA graphs.
        graph_captures: CUDA graphs recorded in this call; graphs of earlier calls are reused.
        graph_refusal: reason why forward passes cannot be recorded, or None.
        kv_pool_bytes: memory of the target's KV pool at the end, in a sum the largest.
        packed_weight_bytes: packed weights of this process on the CPU at the end, in a sum the
            largest; 4-bit and 8-bit layers have none.
        kv_pool_growths: how often the target's KV pool grew and was copied.
        memory_retries: operations of the target that were repeated after the device had run out of
            memory, and graphs and unused capacity were freed.
        draft_forwards: forward passes of a draft model or head.
        draft_seconds: time of drafting.
        verify_seconds: time of the target's forward passes.
        other_seconds: remaining time (packing, verification, stop rules, KV cache moves).
        counters: further counts of the method by name; see its drafter.
    """

    rows: list[RowStats]
    target_forwards: int = 0
    target_tokens: int = 0
    target_padding: int = 0
    uneven_tokens: int = 0
    graph_replays: int = 0
    graph_captures: int = 0
    graph_refusal: str | None = None
    kv_pool_bytes: int = 0
    packed_weight_bytes: int = 0
    kv_pool_growths: int = 0
    memory_retries: int = 0
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
        if self.memory_retries:
            lines.append(("memory retries", str(self.memory_retries), "the device was full"))
        if self.draft_forwards:
            lines.append(("draft forwards", str(self.draft_forwards), ""))
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts)
        lines.append(("seconds", f"{self.seconds:.2f}", shown))
        lines.append(("tokens/s", f"{self.tokens_per_second:.1f}", ""))
        lines += [(name.replace("_", " "), str(n), "") for name, n in self.counters.items()]
        return _table(lines)

    def __add__(self, other: SpecStats) -> SpecStats:
        """Return the rows and counts of both."""
        sums: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in {"counters", "graph_refusal", *MAXIMA}
        }
        sums |= {name: max(getattr(self, name), getattr(other, name)) for name in MAXIMA}
        sums["graph_refusal"] = self.graph_refusal or other.graph_refusal
        counters = Counter(self.counters)
        counters.update(other.counters)
        return SpecStats(**sums, counters=dict(counters))

    def to_dict(self) -> dict[str, Any]:
        """Return all counts, times and rates of the call, without single rows, as JSON values."""
        names = [*(f.name for f in fields(self) if f.name != "rows"), *DERIVED]
        return {name: getattr(self, name) for name in names}

    @property
    def rounds(self) -> int:
        """Verified drafts of all rows, including empty ones."""
        return sum(row.target_forwards for row in self.rows)

    @property
    def seconds(self) -> float:
        """Total time."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def acceptance(self) -> float:
        """Acceptance rate of the drafted tokens."""
        return self.accepted_tokens / max(self.drafted_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second; 0 without any."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def drafted_tokens(self) -> int:
        """Draft tokens of all rows that were sent to the target."""
        return sum(row.drafted_tokens for row in self.rows)

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens of all rows in the output."""
        return sum(row.accepted_tokens for row in self.rows)

    @property
    def tau(self) -> float:
        """Accepted draft tokens per target forward pass and row, without bonus tokens."""
        return self.accepted_tokens / max(self.rounds, 1)

    @property
    def new_tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(row.new_tokens for row in self.rows)

    @property
    def accepted_length_mean(self) -> float:
        """Mean acceptance length of the rows, 1 without accepted drafts."""
        return sum(self._accepted_lengths) / max(len(self.rows), 1)

    @property
    def accepted_length_min(self) -> float:
        """Minimum acceptance length of the rows, which determines when a batch ends."""
        return min(self._accepted_lengths, default=0.0)

    @property
    def padding_ratio(self) -> float:
        """Padding per generated token that an aligned KV cache would need."""
        return self.uneven_tokens / max(self.new_tokens, 1)

    @property
    def _accepted_lengths(self) -> list[float]:
        return [row.accepted_length for row in self.rows]

    def count_round(self, gained: list[int]) -> None:
        """Add a step with the tokens gained by each unfinished row."""
        self.uneven_tokens += len(gained) * max(gained, default=0) - sum(gained)

    @property
    def accepted_by_position(self) -> list[int]:
        """Accepted draft tokens of all rows at depth 1, 2, ...."""
        return _add_up([row.accepted_by_position for row in self.rows])

    @property
    def drafted_by_position(self) -> list[int]:
        """Drafts of all rows that reached depth 1, 2, ...."""
        return _add_up([row.drafted_by_position for row in self.rows])


_collecting: ContextVar[list[SpecStats] | None] = ContextVar("collecting", default=None)


@contextmanager
def collect_stats() -> Iterator[list[SpecStats]]:
    """Yield a list that receives the statistics of every generation in the block, in this thread.

    Use it where the output of `generate()` is not returned: in pipelines, and in Whisper's
    `generate()`, which may generate several times for one recording. `sum(collected,
    SpecStats([]))` adds them up.
    """
    collected: list[SpecStats] = []
    token = _collecting.set(collected)
    try:
        yield collected
    finally:
        _collecting.reset(token)


def publish_stats(stats: SpecStats) -> None:
    """Add the statistics of a finished generation to the list of `collect_stats`."""
    collected = _collecting.get()
    if collected is not None:
        collected.append(stats)


Line = tuple[str, str, str]


def _counts(stats: RowStats | SpecStats, accepted_length: float) -> list[Line]:
    """Return label, value and note of the counts."""
    drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
    lines = [
        ("new tokens", str(stats.new_tokens), ""),
        ("target forwards", str(stats.target_forwards), f"{accepted_length:.2f} tokens each"),
        ("draft tokens", str(drafted), ""),
    ]
    if drafted:
        counts = zip(stats.accepted_by_position, stats.drafted_by_position, strict=False)
        shares = ", ".join(f"{part / whole:.0%}" for part, whole in list(counts)[:SHOWN_POSITIONS])
        by_position = f"; by position: {shares}" if shares else ""
        note = f"{accepted / drafted:.0%}{by_position}"
        lines.append(("accepted", str(accepted), note))
        lines.append(("tau", f"{stats.tau:.2f}", "accepted draft tokens per target forward"))
    return lines


def _table(lines: Sequence[Line]) -> str:
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
    finished rows are zero.
    """

    spec_stats: SpecStats | None = None


class SpecEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with the decoding statistics.

    The statistics are an attribute but not an item: Whisper's `generate()` splits all items by row
    into its own output. There, use `collect_stats`.
    """

    spec_stats: SpecStats | None = None

    @classmethod
    def of(cls, output: SpecGenerateOutput) -> SpecEncoderDecoderOutput:
        """Convert the output of a decoder-only model."""
        converted = cls(**{name: item for name, item in output.items() if name != "spec_stats"})
        converted.spec_stats = output.spec_stats
        return converted


@dataclass
class SpecRequestOutput(GenerationOutput):
    """Output of one sequence of `generate_batch()`: transformers' output with its counts.

    `logprobs` stays empty. `lifespan` is the time of joining the batch and of the end, in seconds
    of `time.perf_counter()`. As in transformers, an error in a processor, a stopping criterion or
    the sampling of this sequence ends only this one: `error` has the message, `status` is `FAILED`,
    and `generated_tokens` has the tokens committed before that round.
    """

    status: RequestStatus = RequestStatus.FINISHED
    spec_stats: RowStats | None = None


class SpecBatchOutput(dict[str, SpecRequestOutput]):
    """Output of `generate_batch()` with a strategy, by request id in order of the prompts."""

    def __init__(self, outputs: Iterable[SpecRequestOutput], spec_stats: SpecStats):
        super().__init__((output.request_id, output) for output in outputs)
        self.spec_stats = spec_stats
