"""What a speculative `generate()` returns beside the tokens: counts and times of the decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers.generation.utils import GenerateDecoderOnlyOutput


@dataclass
class RowStats:
    """Counts of one sequence; see `SpecStats` for the meaning of each name."""

    target_forwards: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Accepted draft tokens per target forward, without the bonus token."""
        return self.accepted_tokens / self.target_forwards if self.target_forwards else 0.0

    def count(self, drafted: int, depth: int, accepted: int) -> None:
        """Add a round: `drafted` nodes in a draft `depth` levels deep, `accepted` of them kept."""
        self.target_forwards += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        for by_position, reached in (
            (self.drafted_by_position, depth),
            (self.accepted_by_position, accepted),
        ):
            by_position.extend([0] * (reached - len(by_position)))
            for position in range(reached):
                by_position[position] += 1


@dataclass
class SpecStats:
    """Counts and times of one `generate()` call.

    Attributes:
        rows: counts of each sequence.
        target_forwards: forward passes of the target model, prompt included.
        draft_forwards: forward passes of a draft model or head.
        draft_seconds: time spent proposing tokens.
        verify_seconds: time inside the target model's forward passes.
        other_seconds: everything else (packing, verdicts, stop rules, key-value moves).
        counters: what the method counts beside that, by name; see its drafter.
    """

    rows: list[RowStats]
    target_forwards: int = 0
    draft_forwards: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)

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
        forwards = sum(row.target_forwards for row in self.rows)
        return self.accepted_tokens / forwards if forwards else 0.0

    @property
    def accepted_by_position(self) -> list[int]:
        """How often the draft token at depth 1, 2, ... was accepted, all rows together."""
        return _add_up([row.accepted_by_position for row in self.rows])

    @property
    def drafted_by_position(self) -> list[int]:
        """How often a draft reached depth 1, 2, ..., all rows together."""
        return _add_up([row.drafted_by_position for row in self.rows])


def _add_up(counts: list[list[int]]) -> list[int]:
    totals = [0] * max((len(row) for row in counts), default=0)
    for row in counts:
        for position, count in enumerate(row):
            totals[position] += count
    return totals


@dataclass
class SpecGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the decoding statistics.

    `scores` and `logits` have one (B, V) tensor per generated token, as in plain `generate()`;
    rows that finished earlier hold zeros there.
    """

    spec_stats: SpecStats | None = None
