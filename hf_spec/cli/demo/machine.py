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
        self._all_before, self._busy_before = _machine_seconds()
        self._own_before = _own_seconds()

    def share_of_others(self) -> float:
        """Return their share of the time of all processors, 0 to 1."""
        everything, busy = _machine_seconds()
        others = busy - self._busy_before - (_own_seconds() - self._own_before)
        return min(1.0, max(0.0, others / max(everything - self._all_before, 1e-9)))


def slowest_to_fastest(records: Sequence[Record], contender: str) -> float:
    """Return how far the times of one contender for the same prompt disagree, at worst.

    Args:
        records: Of a benchmark.
        contender: Whose times are compared.

    Returns:
        Longest over shortest time; 1 if they are equal, or if there is one run of each prompt.
    """
    seconds = defaultdict(list)
    for record in records:
        if record.contender == contender:
            seconds[record.prompt].append(record.seconds)
    return max((max(times) / min(times) for times in seconds.values()), default=1.0)


def warnings(share_of_others: float, disagreement: float) -> list[str]:
    """Return what a reader must know before believing a timing; nothing on an idle machine."""
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


def _machine_seconds() -> tuple[float, float]:
    """Seconds of all processors since the start of the machine: in all, and not idle."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts guests under user time as well.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    everything = sum(times) - guests
    return everything, everything - idle


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system
