"""How long stretches of queued work take, on whichever side of the queue they are done.

A host that queues work for a device and goes on finds out by its own clock how long the queueing
took, and charges the work to whatever waits next. There a moment is marked in the queue itself, and
the device notes when it comes by. Nobody waits for that: what lies between two marks is read once
the device has passed both, which it has by the next time that anything was fetched.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from hf_spec.backend.device import transfer


class Clock(ABC):
    """Marks moments between the work that is done for a generation."""

    @abstractmethod
    def mark(self) -> Any:
        """This moment: after all work until now, before all that follows."""

    @abstractmethod
    def passed(self, mark: Any) -> bool:
        """Whether the moment has come; nobody waits for it."""

    @abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """Time between two moments that have passed."""


class HostClock(Clock):
    """Work is done where and when it is asked for."""

    def mark(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        """Always."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """See `Clock`."""
        return end - start


class DeviceClock(Clock):
    """Marks are events in the stream of a device."""

    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come by."""
        return mark.query()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Clock`."""
        return start.elapsed_time(end) / 1000


def clock_of(device: torch.device) -> Clock:
    """What tells the time of work on a device."""
    return DeviceClock(device) if device.type in transfer.ASYNCHRONOUS else HostClock()


class Stopwatch:
    """Adds up the times of stretches of work by name.

    Attributes:
        clock: what marks them.
        seconds: by name, those that have been read.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self._unread: list[tuple[str, Any, Any]] = []

    def add(self, name: str, start: Any, end: Any) -> None:
        """Add what lies between two marks, the newest so far; it counts when it is read."""
        self._unread.append((name, start, end))

    def read(self) -> dict[str, float]:
        """Read what has passed."""
        while self._unread and self.clock.passed(self._unread[0][-1]):
            name, start, end = self._unread.pop(0)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock.seconds(start, end)
        return self.seconds
