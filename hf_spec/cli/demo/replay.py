"""Recording of timed generations, and their replay side by side at the original speed.

Drawing text during the generation would slow down the measured work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_spec.cli.answer.console_streamer import ACCEPTED_STYLE, DraftedTextStreamer, printable
from hf_spec.evaluation.bench.runner import Record

FRAME_SECONDS = 0.05
# Two borders of a panel, with a space inside each.
BORDER_WIDTH = 4
BORDER_HEIGHT = 2


class Piece(NamedTuple):
    """Text that appeared at once: its time, True for accepted drafts, and index of its block."""

    seconds: float
    text: str
    drafted: bool
    block: int = 0


@dataclass(frozen=True)
class Lane:
    """One text in a replay, with its total length and time."""

    title: str
    pieces: Sequence[Piece]
    num_tokens: int
    seconds: float

    def text(self, seconds: float) -> Text:
        """Return the text after `seconds`, with the style of accepted drafts."""
        shown = Text()
        for piece in self.pieces:
            if piece.seconds <= seconds:
                shown.append(printable(piece.text), ACCEPTED_STYLE if piece.drafted else "")
        return shown

    def clock(self, seconds: float) -> str:
        """Return the elapsed time, at the end also the speed."""
        if seconds < self.seconds:
            return f"{seconds:.1f} s"
        return f"{self.seconds:.1f} s, {self.num_tokens / self.seconds:.0f} tokens/s"


@dataclass(frozen=True)
class Recording:
    """One generation: prompt and blocks (elapsed seconds, tokens).

    The block of a speculative round has the accepted draft tokens and the bonus token.
    """

    prompt_ids: list[int]
    blocks: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """All new tokens."""
        return [token for _, block in self.blocks for token in block]

    def lane(self, record: Record, tokenizer: PreTrainedTokenizerBase) -> Lane:
        """Return the text in pieces, with the total time from `record`."""
        pieces: list[Piece] = []
        number, seconds = 0, 0.0
        streamer = DraftedTextStreamer(
            tokenizer, lambda text, drafted: pieces.append(Piece(seconds, text, drafted, number))
        )
        for number, (seconds, block) in enumerate(self.blocks):  # noqa: B007 - used by the streamer's callback
            streamer.put_row(0, block)
        streamer.end_row(0)
        return Lane(record.contender, pieces, len(self.token_ids), record.seconds)


def card(plain: Record, ours: Record) -> tuple[str, str, str]:
    """Return forward passes, tokens per second (plain → ours), and if outputs are identical."""
    speeds = f"{plain.tokens_per_second:.0f} → {ours.tokens_per_second:.0f}"
    verdict = "identical" if ours.identical else "different"
    return f"{plain.target_forwards} → {ours.target_forwards}", speeds, verdict


class Recorder(BaseStreamer):
    """Streamer that records all generations in `recordings`."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self._began: float | None = None

    def put(self, value: Tensor) -> None:
        """Receive tokens; the first call of a generation has the prompt."""
        now, token_ids = time.perf_counter(), value.flatten().tolist()
        if self._began is None:
            self._began = now
            self.recordings.append(Recording(token_ids))
        else:
            self.recordings[-1].blocks.append((now - self._began, token_ids))

    def end(self) -> None:
        """End a recording; the next tokens are a prompt."""
        self._began = None


def replay(
    console: Console,
    lanes: Sequence[Lane],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Replay the lanes in a terminal, starting together, until the slowest ends."""
    # Height of the tallest panel with its full text, so that the layout does not jump.
    width = max(1, console.width // len(lanes) - BORDER_WIDTH)
    texts = (lane.text(lane.seconds) for lane in lanes)
    height = max(len(text.wrap(console, width)) for text in texts) + BORDER_HEIGHT
    end = max(lane.seconds for lane in lanes)
    start = clock()
    with Live(console=console, auto_refresh=False) as live:
        while (elapsed := clock() - start) < end:
            live.update(_frame(lanes, elapsed, height), refresh=True)
            sleep(FRAME_SECONDS)
        live.update(_frame(lanes, end, height), refresh=True)


def _frame(lanes: Sequence[Lane], seconds: float, height: int) -> RenderableType:
    frame = Table.grid(expand=True)
    panels = []
    for lane in lanes:
        frame.add_column(ratio=1)
        style = "green" if seconds >= lane.seconds else "dim"
        about: dict[str, Any] = {"title": Text(lane.title), "subtitle": lane.clock(seconds)}
        panels.append(Panel(lane.text(seconds), height=height, border_style=style, **about))
    frame.add_row(*panels)
    return frame
