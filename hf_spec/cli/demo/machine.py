"""Whether the machine was busy with something else, which makes timings worthless."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import psutil

from hf_spec.bench.runner import Record

# Chosen so that a machine which stays below both gives ratios worth reading.
BUSY_SHARE = 0.10
UNSTEADY_RATIO = 1.20


class CpuWatch:
    """How much of the processors other programs take from now on."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def share_of_others(self) -> float:
        """Their share of the time of all processors, 0 to 1."""
        pairs = zip(_processor_seconds(), self._before, strict=True)
        everything, busy, own = (now - before for now, before in pairs)
        return min(1.0, max(0.0, (busy - own) / max(everything, 1e-9)))


def slowest_to_fastest(records: Sequence[Record], contender: str) -> float:
    """Longest over shortest time of one contender for the same prompt, at worst."""
    seconds = defaultdict(list)
    for record in records:
        if record.contender == contender:
            seconds[record.prompt].append(record.seconds)
    return max((max(times) / min(times) for times in seconds.values()), default=1.0)


def warnings(share_of_others: float, disagreement: float) -> list[str]:
    """What a reader must know before believing a timing; nothing on an idle machine."""
    found = []
    if share_of_others > BUSY_SHARE:
        found.append(
            f"Other programs took {share_of_others:.0%} of the processors during the timing; "
            "the ratios are not to be trusted. Run the demo again on an idle machine."
        )
    if disagreement > UNSTEADY_RATIO:
        found.append(
            f"Two runs of plain generate() on the same prompt differ by a factor of "
            f"{disagreement:.2f}; the machine's speed is not steady. Try --repeats 5."
        )
    return found


def _processor_seconds() -> tuple[float, float, float]:
    """Seconds of all processors since the machine started: in all, not idle, and our own."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # Linux counts guests under user time as well.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    everything = sum(times) - guests
    idle = times.idle + getattr(times, "iowait", 0.0)
    return everything, everything - idle, own.user + own.system
