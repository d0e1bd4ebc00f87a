"""Scores of rows that have ended, for criteria that read those of the whole batch.

Plain `generate()` runs a row that has ended to the end of the batch, on padding, and shows its
scores to the stopping criteria with those of the others. Nothing else needs them, so they are
computed only where scores are kept and a criterion may look at them.
"""

from __future__ import annotations

from torch import Tensor

from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.verifiers import Verifier, Walk
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.runner import ModelRunner


def run_padding(target: ModelRunner, verifier: Verifier, state: GenerationState) -> None:
    """Ask the criteria that wait for scores of rows that have ended; between two rounds."""
    while missing := state.missing_scores():
        with state.clock("verify"):
            found = _scores_on_padding(target, verifier, state, missing)
        state.show_padding(found)


def _scores_on_padding(
    target: ModelRunner, verifier: Verifier, state: GenerationState, missing: dict[int, range]
) -> dict[int, list[Tensor]]:
    """Per row so many (V,) processed scores, each one more token of padding further on."""
    pad = state.pad_token_id
    texts = [list(tokens) for tokens in state.tokens]
    rows: list[tuple[list[int], list[int]]] = [([], []) for _ in texts]
    for row, places in missing.items():
        texts[row] += [pad] * places.start
        # A stop may have cut off tokens that are stored.
        target.shorten(row, len(texts[row]) - 1)
        chain = [texts[row][-1], *[pad] * (len(places) - 1)]
        rows[row] = chain, list(range(-1, len(chain) - 1))
    tree = DraftTree.from_rows(rows)
    logits = target.forward(tree, texts).logits
    target.keep([list(range(1, len(chain))) for chain, _ in rows])
    nodes = [(row, [pad] * place) for row, places in missing.items() for place in places]
    owners, paths = [row for row, _ in nodes], [path for _, path in nodes]
    walk = Walk(verifier.processors, logits, state)
    scores = iter(walk.look(owners, range(tree.num_nodes), paths))
    # Nodes come row by row; so do the rows that miss scores.
    return {row: [next(scores) for _ in places] for row, places in missing.items()}
