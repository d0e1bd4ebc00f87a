"""Replays on a terminal that is kept in memory, against a clock of their own."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hf_spec.cli.demo.recording import Piece
from hf_spec.cli.demo.replay import Lane, replay

SLOW = Lane("plain", [Piece(1.0, "one ", False), Piece(4.0, "two", False)], 2, 4.0)
FAST = Lane("lookup", [Piece(1.0, "one ", True), Piece(1.0, "two", False)], 2, 1.0)


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")


def test_text_appears_when_it_came() -> None:
    assert [SLOW.text(seconds).plain for seconds in (0.5, 1.0, 4.0)] == ["", "one ", "one two"]
    assert FAST.text(1.0).plain == "one two"


def test_only_accepted_drafts_have_a_style() -> None:
    [span] = FAST.text(1.0).spans
    assert FAST.text(1.0).plain[span.start : span.end] == "one "


def test_the_speed_stands_there_once_it_is_known() -> None:
    assert SLOW.clock(3.96) == "4.0 s"
    assert SLOW.clock(4.0) == "4.0 s, 0 tokens/s"
    assert FAST.clock(9.0) == "1.0 s, 2 tokens/s"


def test_replay_takes_as_long_as_the_slowest(terminal: Console) -> None:
    clock = Clock()
    replay(terminal, [SLOW, FAST], clock, clock.sleep)
    assert clock.now - 100.0 == pytest.approx(4.0, abs=0.1)


def test_the_fast_text_is_whole_while_the_slow_one_is_not(terminal: Console) -> None:
    clock = Clock()
    replay(terminal, [SLOW, FAST], clock, clock.sleep)
    frames = terminal.file.getvalue().split("plain")  # type: ignore[attr-defined]
    [middle, *_] = [frame for frame in frames if "2.0 s" in frame]
    assert middle.count("two") == 1
    assert frames[-1].count("two") == 2
    assert "0 tokens/s" in frames[-1]


def test_control_characters_and_markup_of_a_model_are_not_obeyed(terminal: Console) -> None:
    lane = Lane("[red]x", [Piece(0.0, "\x1b[2J[bold]y", False)], 1, 0.1)
    clock = Clock()
    replay(terminal, [lane, lane], clock, clock.sleep)
    page = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in page
    assert "[red]x" in page
    assert "[bold]y" in page
