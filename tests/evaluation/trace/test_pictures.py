"""Pictures: every node and edge is drawn, and padding is counted correctly."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.evaluation.trace import pictures
from hf_spec.evaluation.trace.pictures import ACCEPTED, PADDING, Canvas


def boxes(canvas: Canvas, fill: str | None = None) -> int:
    """Count boxes with the color `fill`, or all boxes; the background is not a box."""
    found = re.findall(r'rx="3" fill="([^"]*)"', str(canvas))
    return len(found) if fill is None else found.count(fill)


def test_a_canvas_is_xml_and_shows_itself() -> None:
    canvas = Canvas(10, 10, "a < b")
    canvas.box(0, 0, (5, 5), "#ffffff", "<&>")
    assert ElementTree.fromstring(canvas._repr_svg_()).tag.endswith("svg")
    assert repr(canvas) == "<a < b>"


def luminance(color: str) -> float:
    """Return the relative luminance as defined by the WCAG accessibility guidelines."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [{}, pictures.DARK], ids=["light", "dark"])
def test_words_can_be_read_on_every_color(theme: dict[str, str]) -> None:
    ink = luminance(theme.get(pictures.INK, pictures.INK))
    for color in pictures.DARK.keys() - {pictures.INK}:
        light, dark = sorted((ink, luminance(theme.get(color, color))), reverse=True)
        # The minimum contrast of the guidelines (level AA).
        assert (light + 0.05) / (dark + 0.05) >= 4.5, color


def test_a_picture_follows_a_dark_theme() -> None:
    """The background and every box, word, and line have a rule for the dark theme."""
    canvas = pictures.padding("padded", [2, 1], [[1, 2]])
    canvas.arrow((0, 0), (1, 1), dashed=False)
    root = ElementTree.fromstring(str(canvas))
    [style] = (element.text or "" for element in root.iter() if element.tag.endswith("style"))
    rules = dict(re.findall(r'\.hf-spec \[(?:fill|stroke)="(#\w+)"\]\{\w+:(#\w+)\}', style))
    for element in root.iter():
        for kind in ("fill", "stroke"):
            if (color := element.get(kind)) is not None:
                assert f'[{kind}="{color}"]{{{kind}:{pictures.DARK[color]}}}' in style
                assert rules[color] != color
    assert "@media (prefers-color-scheme: dark)" in style
    # The text color is set on the root element.
    assert root.get("class") == "hf-spec"
    assert f'.hf-spec[fill="{pictures.INK}"]' in style


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "the"),
        ("\n\n", "↵↵"),
        ("  ", "␣␣"),
        ("", "∅"),
        ("a\nb", "a↵b"),
        ("internationally", "internati…"),
    ],
)
def test_words_fit_their_boxes(text: str, shown: str) -> None:
    assert pictures.word(text) == shown


def test_a_tree_has_all_nodes_and_the_bonus() -> None:
    canvas = pictures.token_tree(["r", "a", "b", "c"], [-1, 0, 0, 2], accepted=[2], bonus="d")
    assert boxes(canvas) == 5
    assert boxes(canvas, ACCEPTED) == 2
    assert str(canvas).count("<line") == 4
    assert str(canvas).count("stroke-dasharray") == 1
    assert "1 draft token and a bonus token" in str(canvas)


def test_the_bonus_stands_beside_refused_children() -> None:
    """The rejected child and the bonus token follow the same node."""
    canvas = pictures.token_tree(["r", "a"], [-1, 0], bonus="b")
    corners = re.findall(r'<rect x="(\S+)" y="(\S+)" .* rx="3"', str(canvas))
    assert len(set(corners)) == 3


def test_a_graph_has_its_merge_edge() -> None:
    graph = TokenGraph([9, 0], merge_length=1)
    for parent, token in [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 4)]:
        graph.add(parent, token, 0.5)
    assert graph.num_merges == 1
    canvas = pictures.token_graph(graph, list("rabccd"), accepted=[1, 3], note="and a note")
    assert boxes(canvas) == len(graph) == 6
    assert boxes(canvas, ACCEPTED) == 3
    assert str(canvas).count("stroke-dasharray") == 1
    assert "5 nodes drafted, 1 merge edge (dashed); and a note" in str(canvas)


def test_an_edge_that_leads_back_ends_outside_of_the_boxes() -> None:
    """The edge leads from the third column up to the second."""
    graph = TokenGraph([0], merge_length=0)
    for parent, token in [(0, 1), (0, 2), (2, 3), (3, 1)]:
        graph.add(parent, token, 0.5)
    back = re.search(r"<line (.*) stroke-dasharray", str(pictures.token_graph(graph, "rabc")))
    assert back is not None
    ends = dict(re.findall(r'([xy][12])="(\S+)"', back[1]))
    assert float(ends["x1"]) > float(ends["x2"])
    assert float(ends["y2"]) == pictures.TOP + pictures.HEIGHT


@pytest.mark.parametrize("batching", BATCHING)
def test_padding_is_counted(batching: str) -> None:
    """Rows send 4, 1, and 2 tokens; the steps before added 3, 1, 1 and then 1, 2, 1 tokens."""
    canvas = pictures.padding(batching, [4, 1, 2], [[3, 1, 1], [1, 2, 1]])
    inputs = 5 if BATCHING[batching].pads_inputs else 0
    stored = (4 + 2) if BATCHING[batching].pads_kv else 0
    assert f"inputs: {7 + inputs} slots, {inputs} of them padding" in str(canvas)
    assert f"keys and values: {9 + stored} slots, {stored} of them padding" in str(canvas)
    assert boxes(canvas, PADDING) == inputs + stored
    assert boxes(canvas) == 16 + inputs + stored
