"""SVG pictures of drafts and batches: a token tree, a token graph, padding in a batch.

A notebook displays a `Canvas`; `str(canvas)` is the content of an SVG file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from xml.sax.saxutils import escape

from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.forward.padded_batching import BATCHING

Point = tuple[float, float]

GROUND, INK, PALE = "#ffffff", "#1f2937", "#e5e7eb"
ACCEPTED, REFUSED, PADDING = "#bbf7d0", "#f9fafb", "#fca5a5"
ROWS = ("#bfdbfe", "#fde68a", "#ddd6fe", "#a5f3fc")
# Replacement of each color in a dark theme.
DARK = {
    GROUND: "#131416",
    INK: "#d1d5db",
    PALE: "#374151",
    ACCEPTED: "#166534",
    REFUSED: "#1f2937",
    PADDING: "#991b1b",
    **dict(zip(ROWS, ("#1e40af", "#854d0e", "#5b21b6", "#155e75"), strict=True)),
}
# Shapes have the light colors as attributes, for viewers without CSS.
_RULES = "".join(
    f'.hf-spec[fill="{light}"],.hf-spec [fill="{light}"]{{fill:{dark}}}'
    for light, dark in DARK.items()
)
_RULES += f'.hf-spec [stroke="{INK}"]{{stroke:{DARK[INK]}}}'
STYLE = f"<style>@media (prefers-color-scheme: dark){{{_RULES}}}</style>"
# Size of a node's box and space between boxes, in pixels.
WIDTH, HEIGHT, GAP_X, GAP_Y = 76, 28, 34, 14
MARGIN, TOP, FOOT = 20, 48, 38
CELL = (16, 20)
# Maximum characters in a box.
LONGEST_WORD = 10


class Canvas:
    """SVG picture in pixel coordinates that follows the light or dark theme."""

    def __init__(self, width: int, height: int, title: str):
        self.title = title
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hf-spec" '
            f'width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" '
            f'fill="{INK}">',
            f"<title>{escape(title)}</title>",
            STYLE,
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            f'orient="auto"><path d="M0 0L8 4L0 8Z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{GROUND}"/>',
        ]

    def box(self, x: float, y: float, size: Point, fill: str, label: str = "") -> None:
        """Add a rectangle with a centered label."""
        width, height = size
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{INK}" stroke-width="0.8"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, "middle")

    def text(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        """Add a line of text."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def arrow(self, start: Point, end: Point, dashed: bool) -> None:
        """Add an arrow."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" '
            f'stroke="{INK}" stroke-width="1.2"{dash} marker-end="url(#tip)"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_svg_(self) -> str:
        return str(self)


def word(text: str) -> str:
    """Return a token's text for a box: whitespace visible, long words truncated."""
    shown = text.strip() or text.replace("\n", "↵").replace(" ", "␣") or "∅"
    shown = shown.replace("\n", "↵")
    return shown if len(shown) <= LONGEST_WORD else shown[: LONGEST_WORD - 1] + "…"


def token_tree(
    words: Sequence[str],
    parents: Sequence[int],
    accepted: Sequence[int] = (),
    bonus: str | None = None,
) -> Canvas:
    """Draw a verified draft tree.

    `words` and `parents` describe the nodes, root first; `accepted` lists accepted nodes in order,
    without the root; `bonus` is the bonus token after them.
    """
    path = [0, *accepted]
    words, parents = list(words), list(parents)
    if bonus is not None:
        words.append(bonus)
        parents.append(path[-1])
    bonus_node = len(words) - 1 if bonus is not None else -1
    spots = layout(parents)
    canvas = _fitting(spots, "A draft tree: the accepted path is green, the bonus token follows it")
    canvas.text(MARGIN, 24, "root: last committed token")
    canvas.text(240, 24, "draft tokens")
    for node, above in enumerate(parents):
        if above >= 0:
            connect(canvas, spots[above], spots[node], dashed=node == bonus_node)
        fill = ROWS[0] if node == bonus_node else ACCEPTED if node in path else REFUSED
        canvas.box(*spots[node], (WIDTH, HEIGHT), fill, words[node])
    if bonus is not None:
        x, y = spots[bonus_node]
        canvas.text(x + WIDTH / 2, y - 3, "bonus", "middle")
    drafted = f"{len(accepted)} draft token{'' if len(accepted) == 1 else 's'}"
    _foot(canvas, spots, f"one target forward pass: {drafted} and a bonus token")
    return canvas


def token_graph(
    graph: TokenGraph, words: Sequence[str], accepted: Sequence[int] = (), note: str | None = None
) -> Canvas:
    """Draw the token graph of a row with the words of its nodes; merge edges are dashed.

    The line below shows the numbers of nodes and merge edges, and the note.
    """
    spots = layout(graph.parents)
    canvas = _fitting(spots, "A token graph: a merge edge leads to a sequence drafted once")
    for node, edges in enumerate(graph.edges):
        for child, _ in edges:
            connect(canvas, spots[node], spots[child], dashed=graph.parents[child] != node)
    for node, spot in enumerate(spots):
        fill = ACCEPTED if accepted and node in (0, *accepted) else REFUSED
        canvas.box(*spot, (WIDTH, HEIGHT), fill, words[node])
    plural = "" if graph.num_merges == 1 else "s"
    counts = f"{len(graph) - 1} nodes drafted, {graph.num_merges} merge edge{plural} (dashed)"
    _foot(canvas, spots, counts if note is None else f"{counts}; {note}")
    return canvas


def padding(batching: str, nodes: Sequence[int], gains: Sequence[Sequence[int]]) -> Canvas:
    """Draw the padding of a batch in red: inputs of one step, KV cache after several.

    `batching` is a key of `BATCHING`. `nodes` has per row the tokens that pass through the linear
    layers in a step, `gains` per step and row the tokens added to the sequence.
    """
    mode = BATCHING[batching]
    stored = [_line(row, [step[row] for step in gains]) for row in range(len(nodes))]
    if mode.pads_kv:
        stored = [
            [fill for step in gains for fill in _padded(row, step)] for row in range(len(nodes))
        ]
    inputs = [_padded(row, nodes) for row in range(len(nodes))]
    if not mode.pads_inputs:
        inputs = [[fill for row in range(len(nodes)) for fill in _line(row, [nodes[row]])]]
    step_y = CELL[1] + 4
    below = 58 + len(inputs) * step_y + 30
    widest = max(map(len, [*inputs, *stored]))
    width = max(2 * MARGIN + widest * CELL[0], 480)
    height = below + 10 + len(stored) * step_y + 10
    canvas = Canvas(width, height, f"What batching={batching!r} pads, in red")
    canvas.text(MARGIN, 22, f'batching="{batching}"')
    for y, lines, what in ((48, inputs, "inputs"), (below, stored, "keys and values")):
        wasted = sum(fill == PADDING for line in lines for fill in line)
        canvas.text(MARGIN, y, f"{what}: {sum(map(len, lines))} slots, {wasted} of them padding")
        for index, line in enumerate(lines):
            for column, fill in enumerate(line):
                canvas.box(MARGIN + column * CELL[0], y + 10 + index * step_y, CELL, fill)
    return canvas


def _line(row: int, counts: Sequence[int]) -> list[str]:
    return [ROWS[row % len(ROWS)]] * sum(counts)


def _padded(row: int, counts: Sequence[int]) -> list[str]:
    """Return the fills of a row that is padded to the longest."""
    return [*_line(row, [counts[row]]), *[PADDING] * (max(counts) - counts[row])]


def layout(parents: Sequence[int]) -> list[Point]:
    """Return the top left corners of the nodes: columns by depth, leaves below each other."""
    children: list[list[int]] = [[] for _ in parents]
    depths: list[int] = []
    for node, above in enumerate(parents):
        depths.append(depths[above] + 1 if above >= 0 else 0)
        if above >= 0:
            children[above].append(node)
    lines, leaves = dict[int, float](), count()

    def place(node: int) -> float:
        below = [place(child) for child in children[node]]
        lines[node] = sum(below) / len(below) if below else next(leaves)
        return lines[node]

    place(0)
    return [
        (MARGIN + depth * (WIDTH + GAP_X), TOP + lines[node] * (HEIGHT + GAP_Y))
        for node, depth in enumerate(depths)
    ]


def connect(canvas: Canvas, start: Point, end: Point, dashed: bool = False) -> None:
    """Draw an arrow between nodes: side to side if it leads right, else top to bottom."""
    (x, y), (to_x, to_y) = start, end
    if to_x > x:
        canvas.arrow((x + WIDTH, y + HEIGHT / 2), (to_x, to_y + HEIGHT / 2), dashed)
    else:
        down = to_y > y
        tip = to_x + WIDTH / 2, to_y + HEIGHT * (not down)
        canvas.arrow((x + WIDTH / 2, y + HEIGHT * down), tip, dashed)


def _fitting(spots: Sequence[Point], title: str) -> Canvas:
    """Return a canvas with room for nodes at `spots` and a line of text below them."""
    right, bottom = max(x for x, _ in spots) + WIDTH, max(y for _, y in spots) + HEIGHT
    return Canvas(int(max(right + MARGIN, 440)), int(bottom + GAP_Y + FOOT), title)


def _foot(canvas: Canvas, spots: Sequence[Point], words: str) -> None:
    canvas.text(MARGIN, max(y for _, y in spots) + HEIGHT + GAP_Y + FOOT - 14, words)
