"""Counters and load of a server, and their Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hf_spec.common.outputs import SpecStats

# Outcomes of requests.
OUTCOMES = ("answered", "cancelled", "failed", "refused")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Counts:
    """Totals since the start.

    Attributes:
        outcomes: requests by outcome, see `OUTCOMES`.
        rounds: verified drafts of all sequences.
        busy_seconds: time with at least one running sequence.
    """

    outcomes: Mapping[str, int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    busy_seconds: float = 0.0

    def plus(self, stats: SpecStats) -> Counts:
        """Return the totals including the statistics of a batch or of some sequences."""
        return replace(
            self,
            generated_tokens=self.generated_tokens + stats.new_tokens,
            drafted_tokens=self.drafted_tokens + stats.drafted_tokens,
            accepted_tokens=self.accepted_tokens + stats.accepted_tokens,
            rounds=self.rounds + stats.rounds,
            target_forwards=self.target_forwards + stats.target_forwards,
            draft_forwards=self.draft_forwards + stats.draft_forwards,
        )

    @property
    def tau(self) -> float:
        """Accepted draft tokens per target forward pass and sequence, without bonus tokens."""
        return self.accepted_tokens / max(self.rounds, 1)

    @property
    def acceptance(self) -> float:
        """Acceptance rate of drafted tokens."""
        return self.accepted_tokens / max(self.drafted_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per busy second."""
        return self.generated_tokens / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True)
class Load:
    """Current number of running sequences and waiting requests."""

    running: int = 0
    waiting: int = 0


def prometheus_text(counts: Counts, load: Load, responses: Mapping[tuple[str, int], int]) -> str:
    """Return all metrics in Prometheus' text format; `responses` counts by (route, HTTP status)."""
    lines: list[str] = []
    for name, kind, text, values in _metrics(counts, load, responses):
        lines += [f"# HELP hf_spec_{name} {text}", f"# TYPE hf_spec_{name} {kind}"]
        lines += [f"hf_spec_{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


Metric = tuple[str, str, str, Mapping[str, float]]


def _metrics(
    counts: Counts, load: Load, responses: Mapping[tuple[str, int], int]
) -> Iterator[Metric]:
    """Yield name, kind, help text, and values by labels."""
    outcomes = {f'{{outcome="{name}"}}': counts.outcomes.get(name, 0) for name in OUTCOMES}
    yield "requests_total", "counter", "Text requests by outcome.", outcomes
    by_status = {
        f'{{route="{route}",status="{status}"}}': number
        for (route, status), number in sorted(responses.items())
    }
    yield "http_responses_total", "counter", "Responses by route and status.", by_status
    for name, number, text in (
        ("prompt_tokens", counts.prompt_tokens, "Prompt tokens of started requests."),
        ("generated_tokens", counts.generated_tokens, "Generated tokens."),
        ("drafted_tokens", counts.drafted_tokens, "Draft tokens sent to the target."),
        ("accepted_tokens", counts.accepted_tokens, "Accepted draft tokens."),
        ("rounds", counts.rounds, "Verified drafts of all sequences."),
        ("target_forwards", counts.target_forwards, "Forward passes of the model."),
        ("draft_forwards", counts.draft_forwards, "Forward passes of a draft model or head."),
        ("busy_seconds", counts.busy_seconds, "Time with at least one running sequence."),
    ):
        yield f"{name}_total", "counter", text, {"": number}
    for name, value, text in (
        ("tau", counts.tau, "Accepted draft tokens per target forward pass and sequence."),
        ("acceptance", counts.acceptance, "Acceptance rate of draft tokens."),
        ("tokens_per_second", counts.tokens_per_second, "Generated tokens per busy second."),
        ("queue_length", load.waiting, "Requests that wait for a slot in the batch."),
        ("running", load.running, "Sequences in the batch."),
    ):
        yield name, "gauge", text, {"": value}
