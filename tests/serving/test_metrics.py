"""Counters of a server and their Prometheus text."""

from __future__ import annotations

from hf_spec.common.outputs import RowStats, SpecStats
from hf_spec.serving.metrics import Counts, prometheus_text


def test_sums_of_batches_and_their_rates() -> None:
    stats = SpecStats([RowStats(4, 8, 6, 10)], target_forwards=4, draft_forwards=3)
    counts = Counts(busy_seconds=5.0).plus(stats).plus(stats)
    assert (counts.generated_tokens, counts.target_forwards, counts.draft_forwards) == (20, 8, 6)
    assert (counts.tau, counts.acceptance, counts.tokens_per_second) == (1.5, 0.75, 4.0)
    assert (Counts().tau, Counts().acceptance, Counts().tokens_per_second) == (0, 0, 0)


def test_every_metric_has_help_type_and_value() -> None:
    counts = Counts({"answered": 3}, generated_tokens=20, queue_length=7)
    text = prometheus_text(counts, {("/health", 200): 5})
    lines = text.splitlines()
    assert text.endswith("\n")
    assert 'hf_spec_requests_total{outcome="answered"} 3' in lines
    assert 'hf_spec_requests_total{outcome="cancelled"} 0' in lines
    assert 'hf_spec_http_responses_total{route="/health",status="200"} 5' in lines
    assert "hf_spec_queue_length 7" in lines
    assert "hf_spec_generated_tokens_total 20" in lines
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert helped == typed
    values = [line.split("{")[0].split()[0] for line in lines if not line.startswith("#")]
    assert set(values) == set(typed)
