"""The HTML of a comparison: colors, timing, and the picture of a round."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

from hf_spec.cli.demo.replay import Lane, Piece
from hf_spec.cli.ui import rendering
from hf_spec.cli.ui.comparison import Comparison
from hf_spec.evaluation.bench.runner import Record

SPAN = re.compile(
    r'<span class="([^"]*)"(?: data-round="(\d+)")? style="animation-delay:([\d.]+)s">'
    r"([^<]*)</span>"
)


def sides(page: str) -> list[str]:
    """Return the HTML of the two answers, the only sections of the page."""
    return re.findall(r"<section>.*?</section>", page, re.S)


def test_pieces_are_colored_and_timed_as_they_came(comparison: Comparison) -> None:
    for lane, side in zip(comparison.lanes, sides(rendering.answers(comparison)), strict=True):
        clock, *spans = SPAN.findall(side)
        shown = [
            ("hs-drafted" in kinds, float(delay), unescape(text)) for kinds, _, delay, text in spans
        ]
        assert shown == [
            (piece.drafted, round(piece.seconds, 3), piece.text) for piece in lane.pieces
        ]
        assert (float(clock[2]), clock[3]) == (round(lane.seconds, 3), lane.clock(lane.seconds))


def test_words_of_the_speculative_answer_know_their_round(comparison: Comparison) -> None:
    plain, ours = sides(rendering.answers(comparison))
    assert "data-round" not in plain
    rounds = [int(number) for _, number, _, _ in SPAN.findall(ours)[1:]]
    assert rounds == [piece.block for piece in comparison.lanes[1].pieces]
    assert len(set(rounds)) > 5


def test_the_page_is_well_formed(comparison: Comparison) -> None:
    for part in (
        rendering.answers(comparison),
        rendering.figures(comparison),
        rendering.round_picture(comparison, 0),
        rendering.waiting("tree:max_nodes=<4>"),
        rendering.error("a < b & c"),
        rendering.WELCOME,
    ):
        ElementTree.fromstring(f"<div>{part}</div>")


def test_text_of_a_model_is_no_markup(comparison: Comparison) -> None:
    piece = Piece(0.1, "<script>alert(1)</script>\x1b[2J", True, 0)
    lane = Lane("<b>lookup</b>", [piece], 1, 0.2)
    page = rendering.answers(replace(comparison, lanes=(lane, lane)))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def record(seconds: float, tokens: int, forwards: int, identical: bool) -> Record:
    return Record("p", "", "lookup", 0, seconds, 4.0, tokens, forwards, identical)


def test_the_figures(comparison: Comparison) -> None:
    stats = comparison.records[1].stats
    assert stats is not None
    ours = replace(record(1.6, 40, 12, identical=True), stats=stats)
    found = replace(comparison, records=(record(4.0, 40, 40, identical=True), ours), warning="")
    values = re.findall(r"<dd>(.*?)</dd>", rendering.figures(found))
    assert values == ["2.50×", f"{stats.tau:.2f}", "10 → 25", "40 → 12", "identical"]
    assert "hs-bad" not in rendering.figures(found)
    found = replace(found, records=(found.records[0], replace(ours, identical=False)))
    assert 'class="hs-bad"><dd>different' in rendering.figures(found)
    assert "hf-spec verify" in rendering.figures(found)


def test_a_busy_machine_is_told(comparison: Comparison) -> None:
    page = rendering.figures(replace(comparison, warning="warning: busy & slow"))
    assert page.startswith('<p class="hs-refused" role="alert">warning: busy &amp; slow</p>')
    assert "role" not in rendering.figures(replace(comparison, warning=""))


def test_the_drawing_is_that_of_the_round_and_marks_its_words(comparison: Comparison) -> None:
    for number in range(len(comparison.rounds)):
        part = rendering.round_picture(comparison, number)
        assert str(comparison.picture(number)) in part
        assert f'[data-round="{number}"]{{text-decoration:underline' in part
