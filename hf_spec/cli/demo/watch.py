"""Warnings about other programs, which make timings unreliable."""

from __future__ import annotations

import psutil

# Below these limits timings are reliable: processes per processor, and share of all processors.
BUSY_LOAD = 0.5
BUSY_SHARE = 0.10
WARNING = "warning: this machine is busy, so timings are unreliable: it {}. Use an idle machine."


def load_warning() -> str:
    """Return a warning if the load average of the last minute is high, otherwise ""."""
    load, count = psutil.getloadavg()[0], psutil.cpu_count()
    reason = f"has a load average of {load:.1f} on {count} processors"
    return WARNING.format(reason) if load > BUSY_LOAD * count else ""


class CpuWatch:
    """CPU use of other programs."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self.share_of_others()

    def share_of_others(self) -> float:
        """Return their share of all processors since the last call, 0 to 1."""
        own = self._own.cpu_percent() / psutil.cpu_count()
        return min(1.0, max(0.0, (psutil.cpu_percent() - own) / 100))

    def warning(self) -> str:
        """Return a warning if other programs ran since the last call, otherwise ""."""
        share = self.share_of_others()
        reason = f"used {share:.0%} of its processors for other programs"
        return WARNING.format(reason) if share > BUSY_SHARE else ""
