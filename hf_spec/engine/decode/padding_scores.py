"""Scores of rows that have ended, for stopping criteria that read the scores of the whole batch.

Plain `generate()` runs an ended row on padding until the batch ends, and passes its scores to the
criteria with those of the others. They are computed only where scores are kept and there are such
criteria.
"""

from __future__ import annotations

from torch import Tensor

from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.verifiers import Verifier, Walk
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner


def score_padding(target: ModelRunner, verifier: Verifier, state: GenerationState) -> None:
    """Compute the scores that criteria wait for, and evaluate these criteria; between rounds."""
    while missing := state.missing_scores():
        with state.clock("verify"):
            scores = _scores_on_padding(target, verifier, state, missing)
        state.add_padding_scores(scores)


def _scores_on_padding(
    target: ModelRunner, verifier: Verifier, state: GenerationState, missing: dict[int, range]
) -> dict[int, list[Tensor]]:
    """Return per row its missing processed scores, (V,) each, in one forward pass."""
    pad = state.pad_token_id
    texts = [list(tokens) for tokens in state.tokens]
    rows: list[tuple[list[int], list[int]]] = [([], []) for _ in texts]
    for row, positions in missing.items():
        texts[row] += [pad] * positions.start
        # The KV cache may still hold tokens that a stop has removed.
        target.shorten(row, len(texts[row]) - 1)
        chain = [texts[row][-1], *[pad] * (len(positions) - 1)]
        rows[row] = chain, list(range(-1, len(chain) - 1))
    tree = DraftTree.from_rows(rows)
    logits = target.forward(tree, texts).logits
    target.keep([list(range(1, len(chain))) for chain, _ in rows])
    nodes = [(row, [pad] * n) for row, positions in missing.items() for n in positions]
    node_rows, paths = [row for row, _ in nodes], [path for _, path in nodes]
    walk = Walk(verifier.processors, logits, state)
    scores = iter(walk.scores_of(node_rows, range(tree.num_nodes), paths))
    # Nodes are sorted by row, in the order of `missing`.
    return {row: [next(scores) for _ in positions] for row, positions in missing.items()}
