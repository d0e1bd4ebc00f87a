"""Generate the drawings of index.md and how-it-works.md from the data structures that they show.

`python docs/drawings.py` writes them to docs/images/; tests/test_docs.py checks that
they are current.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.evaluation.trace import pictures
from hf_spec.evaluation.trace.pictures import ACCEPTED, PADDING, PALE, REFUSED, ROWS, Canvas

IMAGES = Path(__file__).parent / "images"

# "the cat sat on" is committed; its last token, the root, is not in the KV cache yet.
WORDS = ["on", "the", "a", "mat", "floor", "chair", "and", "."]
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3]
KEPT = [1, 3, 6]
BONUS = "slept"


def example_tree() -> DraftTree:
    """Return the draft tree of the first two drawings."""
    return DraftTree.from_rows([(range(len(WORDS)), PARENTS)])


def token_tree() -> str:
    """Draw a draft tree after its verification."""
    return str(pictures.token_tree(WORDS, PARENTS, KEPT, BONUS))


def ancestor_mask() -> str:
    """Draw the positions that each node of the same tree attends to."""
    tree, cell, left, top = example_tree(), 28, 190, 64
    committed = 3
    size = (cell, cell)
    canvas = Canvas(540, 320, "Every node sees the committed text, its ancestors and itself")
    canvas.text(left, 24, "stored")
    canvas.text(left + committed * cell + 12, 24, "this forward pass")
    for column, word in enumerate(["the", "cat", "sat", *WORDS]):
        x = left + column * cell + (12 if column >= committed else 0) + cell / 2
        canvas.text(x, 48 if column % 2 else 58, word, "middle")
    for node, sees in enumerate(tree.ancestor_mask.tolist()):
        y = top + node * cell
        path, above = [], node
        while above >= 0:
            path.append(WORDS[above])
            above = tree.parent[above]
        canvas.text(left - 12, y + cell / 2 + 4.5, " ".join(reversed(path)), "end")
        for column in range(committed):
            canvas.box(left + column * cell, y, size, PALE)
        for column, seen in enumerate(sees):
            x = left + 12 + (committed + column) * cell
            canvas.box(x, y, size, ACCEPTED if seen else REFUSED)
    canvas.text(20, 308, "a row: one node; filled: what it attends to; its position: root + depth")
    return str(canvas)


def ragged_batch() -> str:
    """Draw three rows of a step, padded and packed."""
    stored, new, cell = (5, 2, 4), (4, 1, 2), 26
    size = (cell, 22)
    canvas = Canvas(560, 300, "The tokens of a step as a padded rectangle and as a packed sequence")
    canvas.text(20, 24, "padded: the linear layers also run the red slots")
    widest = max(new)
    for row, count in enumerate(new):
        for column in range(widest):
            fill = ROWS[row] if column < count else PADDING
            canvas.box(20 + column * cell, 36 + row * 26, size, fill)
    canvas.text(150, 70, f"{len(new) * widest} positions for {sum(new)} tokens")
    canvas.text(20, 142, f"packed: one sequence of {sum(new)} tokens")
    x = 20
    for row, count in enumerate(new):
        for _ in range(count):
            canvas.box(x, 152, size, ROWS[row])
            x += cell
    canvas.text(20, 202, "keys and values: each row continues after its own last token")
    for row, (before, count) in enumerate(zip(stored, new, strict=True)):
        for column in range(before + count):
            fill = PALE if column < before else ROWS[row]
            canvas.box(20 + column * cell, 212 + row * 26, size, fill)
    canvas.text(280, 230, "gray: stored earlier")
    return str(canvas)


def graph_merge() -> str:
    """Draw a token graph in which two hypotheses share their end."""
    words = ["we", "saw", "the", "a", "quick", "brown", "fox", "dog"]
    graph = TokenGraph([words.index("we"), words.index("saw")], merge_length=1)
    drafted = [
        (0, "the", 0.6),
        (0, "a", 0.4),
        (1, "quick", 0.7),
        (2, "quick", 0.5),
        (3, "brown", 0.8),
        (4, "brown", 0.8),  # after "quick" again, so it becomes an edge
        (5, "fox", 0.6),
        (5, "dog", 0.3),
    ]
    for parent, word, probability in drafted:
        graph.add(parent, words.index(word), probability)
    sent = len(graph.unmerge(64, 8).tokens) - 1
    shown = [words[token] for token in graph.tokens]
    canvas = pictures.token_graph(graph, shown, note=f"as a tree {sent} nodes")
    canvas.text(20, 24, "merge_length=1: what follows 'quick brown' is drafted once")
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
