"""Scores of rows that have ended, where processors or criteria read the whole batch.

Plain `generate()` runs an ended row on padding until the batch ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.verifiers import Verifier, Walk
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner


def score_padding(target: ModelRunner, verifier: Verifier, state: GenerationState) -> None:
    """Compute the scores of ended rows that criteria wait for; evaluate these criteria.

    Plain `generate()` passes them to the criteria of the whole batch. Call it between rounds.
    """
    while missing := state.missing_scores():
        with state.clock("verify"):
            scores = _scores_on_padding(target, verifier, state, missing)
        state.add_padding_scores(scores)


def _scores_on_padding(
    target: ModelRunner, verifier: Verifier, state: GenerationState, missing: dict[int, range]
) -> dict[int, list[Tensor]]:
    """Return per row its missing processed scores, (V,) each, in one forward pass."""
    logits = _run_padding(target, state, missing)
    nodes = [(row, [state.pad_token_id] * n) for row, steps in missing.items() for n in steps]
    node_rows, paths = [row for row, _ in nodes], [path for _, path in nodes]
    walk = Walk(verifier.processors, logits, state)
    scores = iter(walk.scores_of(node_rows, range(len(nodes)), paths))
    # Nodes are sorted by row, in the order of `missing`.
    return {row: [next(scores) for _ in positions] for row, positions in missing.items()}


def logits_on_padding(
    target: ModelRunner, verifier: Verifier, state: GenerationState, tree: DraftTree
) -> dict[int, Tensor]:
    """Return per ended row its (K, V) logits on padding in the K steps that `tree` may take.

    Only for processors that read the whole batch; call it before the target runs the tree.
    """
    running = state.unfinished
    ended = [row for row in range(state.num_rows) if state.finished[row]]
    if not verifier.processors.reads_batch or not ended:
        return {}
    steps = 1 + max(tree.height(row) for row in running)
    behind = {row: state.generated[running[0]] - state.generated[row] for row in ended}
    logits = _run_padding(
        target, state, {row: range(count, count + steps) for row, count in behind.items()}
    )
    return dict(zip(ended, logits.split(steps), strict=True))


def _run_padding(
    target: ModelRunner, state: GenerationState, positions_of: Mapping[int, range]
) -> Tensor:
    """Return the (N, V) logits of ended rows at positions of padding, row by row.

    Position 0 is predicted by the last token of a row.
    """
    pad = state.pad_token_id
    texts = [list(tokens) for tokens in state.tokens]
    rows: list[tuple[list[int], list[int]]] = [([], []) for _ in texts]
    for row, positions in positions_of.items():
        texts[row] += [pad] * positions.start
        # The KV cache may still hold tokens that a stop has removed.
        target.shorten(row, len(texts[row]) - 1)
        chain = [texts[row][-1], *[pad] * (len(positions) - 1)]
        rows[row] = chain, list(range(-1, len(chain) - 1))
    tree = DraftTree.from_rows(rows)
    logits = target.forward(tree, texts).logits
    target.keep([list(range(1, len(chain))) for chain, _ in rows])
    return logits
