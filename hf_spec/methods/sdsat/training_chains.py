"""Adaptive chains after many places of clean texts at once, as decoding has them one by one.

Where they stand in training is drawn (Liu et al. 2024, arXiv 2403.18647, section 2.2): a tenth of
the positions, uniformly, and at each starts a window whose length is uniform on 1..L. Tokens in a
window are replaced by adaptive ones; the length of the text stays. What the paper leaves open:

- Of n positions round(n / 10) are drawn, without replacement; at least one if there is any.
- Windows may overlap, and everything in any of them is replaced. Slots count from the newest
  start, so a merged run has slots such as 0, 1, 0, 1, 2 and never one beyond L - 1: identical
  tokens show no difference, diverse ones always begin with the first and follow each other.
- The token at position 0 has nothing before it, and nothing is predicted at the last one, so
  windows lie on 1..n - 2. Of these, positions of the answer are free, those of the prompt are not,
  nor are infilling, begin- or end-of-sequence tokens. A window ends before what is not free.
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
from hf_spec.training.held_back import by_slot

# Texts of one forward when the held-back ones are evaluated.
EVALUATED = 8


@dataclass(frozen=True)
class Text:
    """A text that is learned from.

    Attributes:
        tokens: prompt and answer.
        first: position of the answer's first token.
        fixed: tokens that are never replaced.
        top_tokens, top_probs: (answer tokens, K), the target's opinion; None if it is not known.
    """

    tokens: list[int]
    first: int
    fixed: frozenset[int] = frozenset()
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None

    @classmethod
    def of(cls, example: Example) -> Text:
        """Prompt and answer as they are."""
        prompt, answer = example.response.prompt, example.response.response
        opinion = (example.top_tokens, example.top_probs)
        return cls([*prompt, *answer], len(prompt), frozenset(), *opinion)

    def free(self) -> Tensor:
        """(n,) bool, positions that an adaptive token may take."""
        free = torch.tensor([token not in self.fixed for token in self.tokens])
        free[: max(self.first, 1)] = free[-1:] = False
        return free


@dataclass(frozen=True)
class Windows:
    """Windows of one text.

    Attributes:
        free: (n,) bool, positions that adaptive tokens may take.
        starts: (W,) int64, ascending positions.
        lengths: (W,) int64, 1..L, as drawn, whatever they meet.
    """

    free: Tensor
    starts: Tensor
    lengths: Tensor

    @property
    def chains(self) -> list[tuple[int, int]]:
        """Start and length of each, as far as it lies on free positions."""
        drawn = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [(start, window_length(self.free, start, length)) for start, length in drawn]

    @property
    def slots(self) -> Tensor:
        """(n,) int64: the slot, 0..L-1, of the adaptive token that replaces each token, or -1."""
        taken = torch.zeros_like(self.free)
        newest = torch.zeros(taken.shape, dtype=torch.long)
        newest[self.starts] = self.starts
        for start, length in self.chains:
            taken[start : start + length] = True
        slots = torch.arange(len(taken)) - newest.cummax(dim=0).values
        return slots.masked_fill(~taken, -1)


def draw_windows(free: Tensor, window: int, generator: torch.Generator, share: float) -> Windows:
    """Draw starts, a `share` of the positions that are `free` (n,), and lengths up to `window`."""
    places = free.nonzero()[:, 0]
    count = min(len(places), max(1, round(share * len(places))))
    chosen = places[torch.randperm(len(places), generator=generator)[:count]]
    lengths = torch.randint(1, window + 1, (count,), generator=generator)
    return Windows(free, chosen.sort().values, lengths)


def window_length(free: Tensor, start: int, length: int) -> int:
    """How much of a window at `start` lies on free positions."""
    inside = free[start : start + length].tolist()
    return inside.index(False) if False in inside else len(inside)


def run_chains(
    model: PreTrainedModel,
    tokens: AdaptiveTokens,
    texts: Sequence[Text],
    chains: Sequence[Sequence[tuple[int, int]]],
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Run adaptive chains after many prefixes of clean texts, as decoding does.

    The texts, of any lengths, are run first and without gradients: their keys and values then lie
    where those of a chain of tree nodes would, so the adaptive tokens alone are run as a tree after
    them. `chains` has per text (start, length): adaptive tokens from position start on.

    Returns:
        (M, V) logits at the adaptive tokens, and the (text, position) of each.
    """
    runner = ModelRunner(model, len(texts), virtual_tokens=tokens)
    rows, nodes, places = [], [], []
    count = 0
    for index, (text, mine) in enumerate(zip(texts, chains, strict=True)):
        ids = text.tokens[text.first - 1 : -1]
        parents = list(range(-1, len(ids) - 1))
        for start, length in mine:
            above = start - text.first
            for place, token in enumerate(tokens.chain(length)):
                nodes.append(count + len(ids))
                places.append((index, start + place))
                ids.append(token)
                parents.append(above)
                above = len(ids) - 1
        rows.append((ids, parents))
        count += len(ids)
    ends = DraftTree.from_rows([([text.tokens[-2]], [-1]) for text in texts])
    prompts = [text.tokens[: text.first] for text in texts]
    with runner.active():
        with torch.no_grad():
            runner.forward(ends, [text.tokens[:-1] for text in texts])
            runner.keep([[] for _ in texts])
        # From here on the answer counts as nodes that have run already.
        runner.rows.stored = [text.first - 1 for text in texts]
        return runner.forward(DraftTree.from_rows(rows), prompts, nodes).logits, places


@torch.no_grad()
def agreement(
    model: PreTrainedModel,
    tokens: AdaptiveTokens,
    texts: Sequence[Text],
    length: int,
    num_positions: int,
) -> dict[str, float]:
    """How often chains of `length` after clean text predict what the target said.

    They begin at `num_positions` of each text, evenly spread; those near its end are shorter.

    Returns:
        "slot_j", the share of right tokens at the j-th adaptive token; "slot_j_given", among those
        whose slots before it are right; "accepted", right tokens per chain before the first wrong
        one; "tokens_per_forward", 1 + accepted / 2, what the published loop gives of that.
    """
    right: list[list[bool]] = []
    for begin in range(0, len(texts), EVALUATED):
        batch = texts[begin : begin + EVALUATED]
        chains = []
        for free in (text.free() for text in batch):
            able = free.nonzero()[:, 0]
            picked = torch.linspace(0, len(able) - 1, min(num_positions, len(able)))
            starts = able[picked.round().long()].tolist()
            chains.append([(start, window_length(free, start, length)) for start in starts])
        if not any(chains):
            continue
        logits, places = run_chains(model, tokens, batch, chains)
        found = iter(
            choice == batch[row].tokens[place + 1]
            for choice, (row, place) in zip(logits.argmax(dim=-1).tolist(), places, strict=True)
        )
        right += [[next(found) for _ in range(size)] for mine in chains for _, size in mine]
    figures = by_slot(right, length)
    runs = [row.index(False) if False in row else len(row) for row in right]
    figures["accepted"] = sum(runs) / max(len(runs), 1)
    figures["tokens_per_forward"] = 1 + figures["accepted"] / 2
    return figures
