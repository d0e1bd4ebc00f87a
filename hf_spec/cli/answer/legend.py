"""Meaning of the rows of printed statistics."""

from __future__ import annotations

from typing import Final

from hf_spec.common.outputs import SpecStats

# First words of a row -> meaning; the longest match counts.
LEGEND: Final = {
    "new tokens": "generated tokens",
    "rows": "sequences of the batch",
    "target forwards": "forward passes of the target model, prefill included",
    "draft tokens": "draft tokens that the target verified",
    "tokens/s": "generated tokens divided by the total time",
    "accepted": "draft tokens in the output, and their share by position in the draft",
    "tau": "accepted draft tokens per forward pass of the target",
    "padding": "padding tokens in the target's forward passes",
    "graph replays": "forward passes of the target that replayed a CUDA graph",
    "memory retries": "operations repeated after the device ran out of memory",
    "draft forwards": "forward passes of the draft model or head",
    "seconds": "time of drafting, of the target's forward passes, and of the rest",
    "draft nodes": "drafted tokens, verified or not",
    "merges": "branches of the draft that were joined to equal ones",
    "rounds": "drafts, empty ones included",
    "rounds with merged": "rounds that accepted a token of a joined branch",
    "idle rounds": "rounds without a draft, because none was worth its time",
    "asked": "rounds in which this drafter ran",
    "adaptive rounds": "forward passes that only drafted",
    "verify rounds": "forward passes that only verified",
    "fused rounds": "forward passes that drafted and verified",
    "adaptive nodes": "adaptive tokens in the target's forward passes",
}


def legend(stats: SpecStats) -> str:
    """Return one line for each row of the printed statistics that it knows."""
    labels = [line.split("  ")[0] for line in str(stats).splitlines()]
    starts = [max(filter(label.startswith, LEGEND), key=len, default=None) for label in labels]
    # A drafter registered by the user may count something else.
    return "\n".join(
        f"{label}: {LEGEND[start]}"
        for label, start in zip(labels, starts, strict=True)
        if start is not None
    )
