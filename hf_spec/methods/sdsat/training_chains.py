"""Windows of adaptive tokens in training, and adaptive chains at many positions of clean texts.

Windows are random (Liu and Zhu 2024, arXiv 2403.18647, section 2.2, eq. 4): 10% of the positions,
chosen uniformly, each start a window with a length uniform in 1..L. Adaptive tokens replace the
tokens of a window; the text keeps its length. Choices that the paper leaves open:

- Of n positions round(n / 10) are drawn without replacement, at least one if there is any.
- Windows may overlap; all tokens in any window are replaced. Slots count from the newest start, so
  merged windows have slots such as 0, 1, 0, 1, 2, never beyond L - 1. Identical tokens show no
  difference; diverse ones always start with the first and follow each other.
- Position 0 has no preceding token and the last position no next one, so windows cover 1..n - 2.
  Of these, answer positions are free; prompt, infilling, begin- and end-of-sequence tokens are not.
  A window ends before the first position that is not free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.sdsat.adaptive_tokens import AdaptiveTokens
from hf_spec.training.answers import Example
from hf_spec.training.held_out import by_slot

# Texts per forward pass of the evaluation.
EVALUATION_BATCH = 8


@dataclass(frozen=True)
class Text:
    """Text to train on.

    Attributes:
        tokens: prompt and answer.
        first: position of the answer's first token.
        fixed: token ids that are never replaced.
        top_tokens, top_probs: (answer tokens, K) of the target's distribution; None if not stored.
    """

    tokens: list[int]
    first: int
    fixed: frozenset[int] = frozenset()
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None

    @classmethod
    def of(cls, example: Example) -> Text:
        """Return prompt and answer of an example."""
        prompt, answer = example.response.prompt, example.response.response
        top = example.top_tokens, example.top_probs
        return cls([*prompt, *answer], len(prompt), frozenset(), *top)

    def free(self) -> Tensor:
        """Return (n,) bool, the positions that adaptive tokens may take."""
        free = torch.tensor([token not in self.fixed for token in self.tokens])
        free[: max(self.first, 1)] = free[-1:] = False
        return free


def draw_windows(
    free: Tensor, window: int, generator: torch.Generator, share: float
) -> list[tuple[int, int]]:
    """Draw start and length of windows: a `share` of the (n,) `free` positions, 1..`window` tokens.

    Starts are ascending. A window is cut before the first position that is not free.
    """
    positions = free.nonzero()[:, 0]
    count = min(len(positions), max(1, round(share * len(positions))))
    starts = positions[torch.randperm(len(positions), generator=generator)[:count]]
    lengths = torch.randint(1, window + 1, (count,), generator=generator)
    drawn = zip(starts.sort().values.tolist(), lengths.tolist(), strict=True)
    return [(start, window_length(free, start, length)) for start, length in drawn]


def slots_of(windows: Sequence[tuple[int, int]], num_positions: int) -> Tensor:
    """Return (n,) int64 slots, 0..L-1, of the adaptive tokens at n positions, -1 for none."""
    replaced = torch.zeros(num_positions, dtype=torch.bool)
    newest = torch.zeros(num_positions, dtype=torch.long)
    for start, length in windows:
        newest[start] = start
        replaced[start : start + length] = True
    slots = torch.arange(num_positions) - newest.cummax(dim=0).values
    return slots.masked_fill(~replaced, -1)


def window_length(free: Tensor, start: int, length: int) -> int:
    """Return the length of a window at `start`, cut before the first position not `free`."""
    inside = free[start : start + length].tolist()
    return inside.index(False) if False in inside else len(inside)


def run_chains(
    model: PreTrainedModel,
    tokens: AdaptiveTokens,
    texts: Sequence[Text],
    chains: Sequence[Sequence[tuple[int, int]]],
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Run adaptive chains after many prefixes of clean texts, as decoding does.

    The clean texts, of any lengths, run first without gradients. Their keys and values are stored
    like those of a chain of tree nodes, so only the adaptive tokens run as a tree after them.
    `chains` are (start, length) per text; the first adaptive token is at position start.

    Returns:
        (M, V) logits at the adaptive tokens, and the (text, position) of each.
    """
    runner = ModelRunner(model, len(texts), virtual_tokens=tokens)
    rows, nodes, positions = [], [], []
    count = 0
    for index, (text, of_text) in enumerate(zip(texts, chains, strict=True)):
        ids = text.tokens[text.first - 1 : -1]
        parents = list(range(-1, len(ids) - 1))
        for start, length in of_text:
            parent = start - text.first
            for slot, token in enumerate(tokens.chain(length)):
                nodes.append(count + len(ids))
                positions.append((index, start + slot))
                ids.append(token)
                parents.append(parent)
                parent = len(ids) - 1
        rows.append((ids, parents))
        count += len(ids)
    ends = DraftTree.from_rows([([text.tokens[-2]], [-1]) for text in texts])
    prompts = [text.tokens[: text.first] for text in texts]
    with runner.active():
        with torch.no_grad():
            runner.forward(ends, [text.tokens[:-1] for text in texts])
            runner.keep([[] for _ in texts])
        # From here on the answer tokens count as tree nodes that have run.
        runner.rows.stored = [text.first - 1 for text in texts]
        return runner.forward(DraftTree.from_rows(rows), prompts, nodes).logits, positions


@torch.no_grad()
def agreement(
    model: PreTrainedModel,
    tokens: AdaptiveTokens,
    texts: Sequence[Text],
    length: int,
    num_positions: int,
) -> dict[str, float]:
    """Measure how often chains of `length` after clean text predict the target's tokens.

    Chains start at `num_positions` of each text, evenly spread; those near its end are shorter.

    Returns:
        The figures of `by_slot`; "accepted", the mean number of correct tokens before the first
        wrong one; "tokens_per_forward", 1 + accepted / 2, for the published loop.
    """
    correct: list[list[bool]] = []
    for begin in range(0, len(texts), EVALUATION_BATCH):
        batch = texts[begin : begin + EVALUATION_BATCH]
        chains = []
        for free in (text.free() for text in batch):
            positions = free.nonzero()[:, 0]
            picked = torch.linspace(0, len(positions) - 1, min(num_positions, len(positions)))
            starts = positions[picked.round().long()].tolist()
            chains.append([(start, window_length(free, start, length)) for start in starts])
        if not any(chains):
            continue
        logits, at = run_chains(model, tokens, batch, chains)
        hits = iter(
            choice == batch[row].tokens[position + 1]
            for choice, (row, position) in zip(logits.argmax(dim=-1).tolist(), at, strict=True)
        )
        correct += [[next(hits) for _ in range(size)] for of_text in chains for _, size in of_text]
    metrics = by_slot(correct, length)
    runs = [row.index(False) if False in row else len(row) for row in correct]
    metrics["accepted"] = sum(runs) / max(len(runs), 1)
    metrics["tokens_per_forward"] = 1 + metrics["accepted"] / 2
    return metrics
