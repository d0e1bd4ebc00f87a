"""The drawings of how-it-works.md, made from the data structures they show.

`python docs/drawings.py` writes them to docs/images/; tests/test_docs.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from hf_spec.decoding.graph import TokenGraph
from hf_spec.decoding.tree import DraftTree

IMAGES = Path(__file__).parent / "images"

INK, PALE, ACCEPTED, REFUSED, PADDING = "#1f2937", "#e5e7eb", "#bbf7d0", "#ffffff", "#fca5a5"
ROWS = ("#bfdbfe", "#fde68a", "#ddd6fe")
WIDTH, HEIGHT, GAP_X, GAP_Y = 76, 28, 34, 14

# "the cat sat on" is committed; its last token, the root, is not stored yet.
WORDS = ["on", "the", "a", "mat", "floor", "chair", "and", "."]
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3]
KEPT = [0, 1, 3, 6]
BONUS = "slept"


class Canvas:
    """Shapes of an SVG picture on white ground."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" '
            f'fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            f'orient="auto"><path d="M0 0L8 4L0 8Z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self, x: float, y: float, size: tuple[float, float], fill: str, label: str = ""
    ) -> None:
        """A rectangle with a centred label."""
        width, height = size
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{INK}" stroke-width="0.8"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, "middle")

    def text(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        """A line of text."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], dashed: bool) -> None:
        """A line with a tip."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" '
            f'stroke="{INK}" stroke-width="1.2"{dash} marker-end="url(#tip)"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def places(parents: Sequence[int], depths: Sequence[int]) -> list[tuple[float, float]]:
    """Top left corners of nodes: columns by depth, leaves one below the other."""
    children: list[list[int]] = [[] for _ in parents]
    for node, above in enumerate(parents):
        if above >= 0:
            children[above].append(node)
    leaves = [node for node in _depth_first(children) if not children[node]]
    lines: dict[int, float] = {leaf: line for line, leaf in enumerate(leaves)}
    # Children stand behind their parents, so from the last node on their lines are known.
    for node in reversed(range(len(parents))):
        if children[node]:
            lines[node] = sum(lines[child] for child in children[node]) / len(children[node])
    return [
        (20 + depth * (WIDTH + GAP_X), 48 + lines[node] * (HEIGHT + GAP_Y))
        for node, depth in enumerate(depths)
    ]


def _depth_first(children: Sequence[Sequence[int]], node: int = 0) -> Iterator[int]:
    yield node
    for child in children[node]:
        yield from _depth_first(children, child)


def connect(
    canvas: Canvas, start: tuple[float, float], end: tuple[float, float], dashed: bool = False
) -> None:
    """An arrow from the right side of one node to the left side of another."""
    middle = HEIGHT / 2
    canvas.arrow((start[0] + WIDTH, start[1] + middle), (end[0], end[1] + middle), dashed)


def example_tree() -> DraftTree:
    """The draft tree of the first two drawings."""
    return DraftTree.from_rows([(range(len(WORDS)), PARENTS)])


def token_tree() -> str:
    """A draft tree after its verification."""
    tree = example_tree()
    spots = places(tree.host.parent, tree.host.depth)
    canvas = Canvas(
        580, 254, "A draft tree: the accepted path is green, the bonus token follows it"
    )
    canvas.text(20, 24, "root: last committed token")
    canvas.text(240, 24, "draft tokens")
    for node, above in enumerate(tree.host.parent):
        if above >= 0:
            connect(canvas, spots[above], spots[node])
        fill = ACCEPTED if node in KEPT else REFUSED
        canvas.box(*spots[node], (WIDTH, HEIGHT), fill, WORDS[node])
    end = spots[KEPT[-1]]
    bonus = (end[0] + WIDTH + GAP_X, end[1])
    connect(canvas, end, bonus, dashed=True)
    canvas.box(*bonus, (WIDTH, HEIGHT), ROWS[0], BONUS)
    canvas.text(bonus[0] + WIDTH / 2, bonus[1] - 8, "bonus", "middle")
    canvas.text(
        20, 240, f"one forward of the target: {len(KEPT) - 1} draft tokens and a bonus token"
    )
    return str(canvas)


def ancestor_mask() -> str:
    """What each node of the same tree may look at."""
    tree, cell, left, top = example_tree(), 28, 190, 64
    committed = 3
    size = (cell, cell)
    canvas = Canvas(540, 320, "Every node sees the committed text, its ancestors and itself")
    canvas.text(left, 24, "stored")
    canvas.text(left + committed * cell + 12, 24, "this forward")
    for column, word in enumerate(["the", "cat", "sat", *WORDS]):
        x = left + column * cell + (12 if column >= committed else 0) + cell / 2
        canvas.text(x, 48 if column % 2 else 58, word, "middle")
    for node, sees in enumerate(tree.ancestor_mask.tolist()):
        y = top + node * cell
        path, above = [], node
        while above >= 0:
            path.append(WORDS[above])
            above = tree.host.parent[above]
        canvas.text(left - 12, y + cell / 2 + 4.5, " ".join(reversed(path)), "end")
        for column in range(committed):
            canvas.box(left + column * cell, y, size, PALE)
        for column, seen in enumerate(sees):
            x = left + 12 + (committed + column) * cell
            canvas.box(x, y, size, ACCEPTED if seen else REFUSED)
    canvas.text(20, 308, "a row: one node; filled: what it attends to; its position: root + depth")
    return str(canvas)


def ragged_batch() -> str:
    """Three rows of a step, padded and packed."""
    stored, new, cell = (5, 2, 4), (4, 1, 2), 26
    size = (cell, 22)
    canvas = Canvas(560, 300, "The tokens of a step as a padded rectangle and as a packed sequence")
    canvas.text(20, 24, "padded: the linear layers run the red places too")
    widest = max(new)
    for row, count in enumerate(new):
        for column in range(widest):
            fill = ROWS[row] if column < count else PADDING
            canvas.box(20 + column * cell, 36 + row * 26, size, fill)
    canvas.text(150, 70, f"{len(new) * widest} places for {sum(new)} tokens")
    canvas.text(20, 142, f"packed: one sequence of {sum(new)} tokens")
    x = 20
    for row, count in enumerate(new):
        for _ in range(count):
            canvas.box(x, 152, size, ROWS[row])
            x += cell
    canvas.text(20, 202, "keys and values: each row goes on behind its own last token")
    for row, (before, count) in enumerate(zip(stored, new, strict=True)):
        for column in range(before + count):
            fill = PALE if column < before else ROWS[row]
            canvas.box(20 + column * cell, 212 + row * 26, size, fill)
    canvas.text(280, 230, "grey: stored earlier")
    return str(canvas)


def graph_merge() -> str:
    """A token graph in which the end of one hypothesis is that of another."""
    words = ["we", "saw", "the", "a", "quick", "brown", "fox", "dog"]
    graph = TokenGraph([words.index("we"), words.index("saw")], merge_length=1)
    drafted = [
        (0, "the", 0.6),
        (0, "a", 0.4),
        (1, "quick", 0.7),
        (2, "quick", 0.5),
        (3, "brown", 0.8),
        (4, "brown", 0.8),  # behind "quick" again, so it becomes an edge
        (5, "fox", 0.6),
        (5, "dog", 0.3),
    ]
    for father, word, probability in drafted:
        graph.add(father, words.index(word), probability)
    spots = places(graph.fathers, graph.depth)
    canvas = Canvas(580, 200, "A token graph: a merge edge leads to a run that is drafted once")
    canvas.text(20, 24, "merge_length=1: what follows 'quick brown' is drafted once")
    for node, edges in enumerate(graph.edges):
        for child, _ in edges:
            connect(canvas, spots[node], spots[child], dashed=graph.fathers[child] != node)
    for node, spot in enumerate(spots):
        canvas.box(*spot, (WIDTH, HEIGHT), REFUSED, words[graph.tokens[node]])
    sent = len(graph.unmerge(64, 8).tokens) - 1
    canvas.text(
        20,
        188,
        f"{len(graph) - 1} nodes drafted, {graph.num_merges} merge edge (dashed); "
        f"as a tree {sent} nodes",
    )
    return str(canvas)


DRAWINGS: dict[str, Callable[[], str]] = {
    "token_tree.svg": token_tree,
    "ancestor_mask.svg": ancestor_mask,
    "ragged_batch.svg": ragged_batch,
    "graph_merge.svg": graph_merge,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
