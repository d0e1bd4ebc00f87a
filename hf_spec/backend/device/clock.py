"""Durations of work on the host or queued on a device.

The host's clock measures only how long queueing takes; the work itself would be charged to the next
synchronization. On a device, moments are therefore marked by events in its stream. Durations are
read without synchronizing, once the device has passed both events.
"""

from __future__ import annotations

import time
from typing import Any

import torch

# Device types that queue work. ROCm calls its devices "cuda".
QUEUING = {"cuda", "mps", "xpu"}


class Clock:
    """Marks moments in the work of a generation: here in work that the host runs synchronously."""

    def mark(self) -> Any:
        """Return the current moment: after all work so far, before all later work."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Return True if the moment has been reached; does not synchronize."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two moments that have passed."""
        seconds: float = end - start
        return seconds


class DeviceClock(Clock):
    """Clock of a device; marks are events in its stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._module = torch.get_device_module(device)

    def mark(self) -> Any:
        """Record an event in the current stream; MPS has only one."""
        event = self._module.Event(enable_timing=True)
        if hasattr(self._module, "current_stream"):
            event.record(self._module.current_stream(self._device))
        else:
            event.record()
        return event

    def passed(self, mark: Any) -> bool:
        """Return True if the device has reached the event."""
        reached: bool = mark.query()
        return reached

    def seconds(self, start: Any, end: Any) -> float:
        """See `Clock`."""
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000


def clock_of(device: torch.device) -> Clock:
    """Return the clock for work on a device."""
    return DeviceClock(device) if device.type in QUEUING else Clock()


class Stopwatch:
    """Sums of durations by name; `seconds` holds those that were read so far."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self._unread: list[tuple[str, Any, Any]] = []

    def add(self, name: str, start: Any, end: Any) -> None:
        """Add the time between two marks, in order; it counts once it is read."""
        self._unread.append((name, start, end))

    def read(self) -> dict[str, float]:
        """Read the durations whose marks have passed; return `seconds`."""
        while self._unread and self.clock.passed(self._unread[0][-1]):
            name, start, end = self._unread.pop(0)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock.seconds(start, end)
        return self.seconds
