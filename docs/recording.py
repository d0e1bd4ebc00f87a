"""A terminal recording for the front page: a command in a real terminal, as an animated SVG.

`python docs/recording.py record` runs `hf-spec demo` in a pseudo-terminal and keeps what it writes
in `docs/images/demo.cast` (asciicast v2, which asciinema plays, too; git leaves it out); `python
docs/recording.py draw` makes the picture from that. Waiting is cut short, so that the picture plays
for 20 seconds; what is on the screen is as it was. Record on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import NamedTuple
from xml.sax.saxutils import escape

import pyte

IMAGES = Path(__file__).parent / "images"
CAST, PICTURE = IMAGES / "demo.cast", IMAGES / "demo.svg"
COMMAND = ["hf-spec", "demo"]
COLUMNS, LINES = 100, 30

# Of the picture: how long it plays, of which the last screen stands still, and the longest wait
# between two outputs that is shown, in seconds; the time between two screens.
PLAYS, STANDS, LONGEST_WAIT, TICK = 20.0, 4.0, 0.5, 0.1
# Of a letter, and around the screen, in pixels.
WIDTH, HEIGHT, MARGIN = 7.2, 16, 12
GROUND, INK = "#131416", "#d1d5db"
COLOURS = {
    "default": INK,
    "black": "#6b7280",
    "red": "#f87171",
    "green": "#4ade80",
    "brown": "#facc15",
    "blue": "#60a5fa",
    "magenta": "#c084fc",
    "cyan": "#22d3ee",
    "white": "#f9fafb",
}


class Piece(NamedTuple):
    """Letters of one look on a line, from a column on."""

    column: int
    text: str
    colour: str
    bold: bool


@dataclass(frozen=True)
class Stay:
    """A line of the screen that stays as it is for a time, in seconds of the picture."""

    line: int
    pieces: tuple[Piece, ...]
    begin: float
    end: float


def record(command: Sequence[str], path: Path, columns: int = COLUMNS, lines: int = LINES) -> int:
    """Run a command in a pseudo-terminal, write what it writes with the times; its status."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    shown = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
    start = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=shown)
    os.close(theirs)
    head = {"version": 2, "width": columns, "height": lines, "title": " ".join(command)}
    with path.open("w", encoding="utf-8") as file:
        print(json.dumps(head), file=file)
        for text in _read(ours):
            print(json.dumps([round(time.monotonic() - start, 3), "o", text]), file=file)
    return process.wait()


def _read(descriptor: int) -> Iterator[str]:
    rest = b""
    while True:
        try:
            new = os.read(descriptor, 1 << 16)
        except OSError:
            # Linux says so when the command has ended.
            return
        if not new:
            return
        rest += new
        # A letter of several bytes may be cut.
        text = rest.decode("utf-8", errors="ignore")
        whole = text.encode("utf-8")
        if rest.startswith(whole):
            rest = rest[len(whole) :]
            yield text


def draw(path: Path) -> str:
    """The SVG of a recording, which begins again when it has ended."""
    head, *events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    title = f"$ {head['title']}"
    columns, lines = head["width"], head["height"]
    stays = list(_stays(events, columns, lines, title))
    width, height = columns * WIDTH + 2 * MARGIN, (lines + 1) * HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-monospace,Menlo,Consolas,'
        f'monospace" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="6" fill="{GROUND}"/>',
        # Everything is shown and hidden by the time since this began, over and over.
        f'<rect width="0" height="0"><animate id="t" attributeName="x" from="0" to="0" '
        f'dur="{PLAYS:g}s" begin="0s;t.end"/></rect>',
    ]
    for stay in stays:
        ended = f"t.begin+{stay.end:.2f}s" if stay.end < PLAYS else "t.end"
        shown = (
            f'<set attributeName="display" to="inline" begin="t.begin+{stay.begin:.2f}s" '
            f'end="{ended}"/>'
        )
        # Programs that know no animation show how it ends.
        hidden = ' display="none"' if stay.end < PLAYS or stay.begin > 0 else ""
        line = "".join(_letters(piece, stay.line) for piece in stay.pieces)
        parts.append(f"<g{hidden}>{shown if hidden else ''}{line}</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _letters(piece: Piece, line: int) -> str:
    x, y = MARGIN + piece.column * WIDTH, MARGIN + (line + 1) * HEIGHT - 4
    bold = ' font-weight="bold"' if piece.bold else ""
    colour = f' fill="{piece.colour}"' if piece.colour != INK else ""
    length = f' textLength="{len(piece.text) * WIDTH:.1f}"'
    return (
        f'<text x="{x:.1f}" y="{y:.0f}"{length}{bold}{colour} xml:space="preserve">'
        f"{escape(piece.text)}</text>"
    )


def _stays(
    events: Sequence[tuple[float, str, str]], columns: int, lines: int, title: str
) -> Iterator[Stay]:
    """Every line of the screens as long as it stays the same; above them the command."""
    yield Stay(0, (Piece(0, title, COLOURS["green"], True),), 0.0, PLAYS)
    screen = pyte.Screen(columns, lines)
    stream = pyte.Stream(screen)
    current: list[tuple[tuple[Piece, ...], float]] = [((), 0.0)] * lines
    times = _times([event[0] for event in events])
    for index, (now, (_, _, text)) in enumerate(zip(times, events, strict=True)):
        stream.feed(text)
        if index + 1 < len(times) and int(times[index + 1] / TICK) == int(now / TICK):
            continue
        for line in screen.dirty:
            pieces = tuple(_pieces(screen, line))
            before, begin = current[line]
            if pieces != before:
                if before and begin < now:
                    yield Stay(line + 1, before, begin, now)
                current[line] = pieces, now
        screen.dirty.clear()
    for line, (pieces, begin) in enumerate(current):
        if pieces:
            yield Stay(line + 1, pieces, begin, PLAYS)


def _times(seconds: Sequence[float]) -> list[float]:
    """When each output is shown: waits are cut short, and all of it is as fast as need be."""
    waits = [
        min(now - before, LONGEST_WAIT)
        for before, now in zip([0.0, *seconds[:-1]], seconds, strict=True)
    ]
    factor = min(1.0, (PLAYS - STANDS) / max(sum(waits), 1e-9))
    found, now = [], 0.0
    for wait in waits:
        now += wait * factor
        found.append(now)
    return found


def _pieces(screen: pyte.Screen, line: int) -> Iterator[Piece]:
    letters = [screen.buffer[line][column] for column in range(screen.columns)]
    looks = [(COLOURS.get(one.fg, INK), one.bold) for one in letters]
    begin = 0
    for column in range(1, len(letters) + 1):
        if column < len(letters) and looks[column] == looks[begin]:
            continue
        text = "".join(one.data for one in letters[begin:column])
        if stripped := text.rstrip():
            spaces = len(stripped) - len(stripped.lstrip())
            yield Piece(begin + spaces, stripped.lstrip(), *looks[begin])
        begin = column


def main(argv: list[str] | None = None) -> int:
    """Command line; the status of the command that is recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "draw"))
    what = parser.parse_args(argv).what
    status = record(COMMAND, CAST) if what == "record" else 0
    if status == 0:
        PICTURE.write_text(draw(CAST), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
