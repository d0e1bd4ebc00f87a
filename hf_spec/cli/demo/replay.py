"""Two recorded generations side by side, at the speed at which they ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hf_spec.cli.answer.console_streamer import ACCEPTED_STYLE, printable
from hf_spec.cli.demo.recording import Piece

FRAME_SECONDS = 0.05
# What a panel takes from its column: two borders with a space inside each.
BORDER_WIDTH = 4
BORDER_HEIGHT = 2


@dataclass(frozen=True)
class Lane:
    """One of the texts.

    Attributes:
        title: Above it.
        pieces: Of the text, as they came.
        num_tokens: In all.
        seconds: Of the whole generation.
    """

    title: str
    pieces: Sequence[Piece]
    num_tokens: int
    seconds: float

    def text(self, seconds: float) -> Text:
        """Return what had appeared after so many seconds, accepted drafts in their style."""
        shown = Text()
        for piece in self.pieces:
            if piece.seconds <= seconds:
                shown.append(printable(piece.text), ACCEPTED_STYLE if piece.drafted else "")
        return shown

    def clock(self, seconds: float) -> str:
        """Return the time so far, and once it is over the speed."""
        if seconds < self.seconds:
            return f"{seconds:.1f} s"
        return f"{self.seconds:.1f} s, {self.num_tokens / self.seconds:.0f} tokens/s"


def replay(
    console: Console,
    lanes: Sequence[Lane],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the lanes as they ran, all from the same moment on, until the slowest has ended.

    Args:
        console: A terminal.
        lanes: From left to right.
        clock: Seconds from an arbitrary moment.
        sleep: Waits so many seconds.
    """
    height = _height(console, lanes)
    end = max(lane.seconds for lane in lanes)
    start = clock()
    with Live(console=console, auto_refresh=False) as live:
        while (elapsed := clock() - start) < end:
            live.update(_frame(lanes, elapsed, height), refresh=True)
            sleep(FRAME_SECONDS)
        live.update(_frame(lanes, end, height), refresh=True)


def _frame(lanes: Sequence[Lane], seconds: float, height: int) -> RenderableType:
    frame = Table.grid(expand=True)
    for _ in lanes:
        frame.add_column(ratio=1)
    frame.add_row(
        *(
            Panel(
                lane.text(seconds),
                title=Text(lane.title),
                subtitle=lane.clock(seconds),
                height=height,
                border_style="green" if seconds >= lane.seconds else "dim",
            )
            for lane in lanes
        )
    )
    return frame


def _height(console: Console, lanes: Sequence[Lane]) -> int:
    """Lines of the tallest panel once its text is whole, so that nothing jumps meanwhile."""
    width = max(1, console.width // len(lanes) - BORDER_WIDTH)
    lines = (len(lane.text(lane.seconds).wrap(console, width)) for lane in lanes)
    return max(lines) + BORDER_HEIGHT
