"""Counters and load of a server, and their Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hf_spec.common.outputs import SpecStats

# Outcomes of requests.
OUTCOMES = ("answered", "cancelled", "failed", "refused")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Help texts of the metrics that are attributes of `Counts`.
TOTALS = {
    "prompt_tokens": "Prompt tokens of started requests.",
    "generated_tokens": "Generated tokens.",
    "drafted_tokens": "Draft tokens sent to the target.",
    "accepted_tokens": "Accepted draft tokens.",
    "rounds": "Verified drafts of all sequences.",
    "target_forwards": "Forward passes of the model.",
    "draft_forwards": "Forward passes of a draft model or head.",
    "busy_seconds": "Time with at least one running sequence.",
}
GAUGES = {
    "tau": "Accepted draft tokens per target forward pass and sequence.",
    "acceptance": "Acceptance rate of draft tokens.",
    "tokens_per_second": "Generated tokens per busy second.",
    "queue_length": "Requests that wait for a slot in the batch.",
    "running": "Sequences in the batch.",
}


@dataclass(frozen=True)
class Counts:
    """Totals since the start by outcome, see `OUTCOMES`, and by `TOTALS`, and the current load."""

    outcomes: Mapping[str, int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    busy_seconds: float = 0.0
    queue_length: int = 0
    running: int = 0

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


def prometheus_text(counts: Counts, responses: Mapping[tuple[str, int], int]) -> str:
    """Return all metrics in Prometheus' text format; `responses` counts by (route, HTTP status)."""
    outcomes = {f'{{outcome="{name}"}}': counts.outcomes.get(name, 0) for name in OUTCOMES}
    by_status = {
        f'{{route="{route}",status="{status}"}}': number
        for (route, status), number in sorted(responses.items())
    }
    # Name, kind, help text, and values by labels.
    metrics: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("requests_total", "counter", "Text requests by outcome.", outcomes),
        ("http_responses_total", "counter", "Responses by route and status.", by_status),
    ]
    for name, text in TOTALS.items():
        metrics.append((f"{name}_total", "counter", text, {"": getattr(counts, name)}))
    for name, text in GAUGES.items():
        metrics.append((name, "gauge", text, {"": getattr(counts, name)}))
    lines: list[str] = []
    for name, kind, text, values in metrics:
        lines += [f"# HELP hf_spec_{name} {text}", f"# TYPE hf_spec_{name} {kind}"]
        lines += [f"hf_spec_{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"
