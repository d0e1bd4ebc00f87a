"""Adaptive chains behind many places of clean texts at once, as decoding has them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.execution.runner import ModelRunner
from hf_spec.execution.tree import DraftTree
from hf_spec.models.adaptive_tokens import AdaptiveTokens
from hf_spec.training.figures import by_slot
from hf_spec.training.teacher import Example
from hf_spec.training.windows import free_positions, window_length

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
        response = example.response
        return cls(
            [*response.prompt, *response.response],
            len(response.prompt),
            frozenset(),
            example.top_tokens,
            example.top_probs,
        )

    def free(self) -> Tensor:
        """(n,) bool, positions that an adaptive token may take."""
        kept = [token in self.fixed for token in self.tokens] if self.fixed else None
        return free_positions(len(self.tokens), self.first, kept)


def run_chains(
    model: PreTrainedModel,
    tokens: AdaptiveTokens,
    texts: Sequence[Text],
    chains: Sequence[Sequence[tuple[int, int]]],
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Run adaptive chains behind many prefixes of clean texts, as decoding does.

    The texts are run first and without gradients: their keys and values then lie where those of a
    chain of tree nodes would, so the adaptive tokens alone are run as a tree behind them.

    Args:
        model: the target.
        tokens: its adaptive tokens.
        texts: of any lengths.
        chains: per text (start, length): adaptive tokens at positions start to start + length - 1.

    Returns:
        (M, V) logits at the adaptive tokens, and the (text, position) of each.
    """
    runner = ModelRunner(model, len(texts), virtual_tokens=tokens)
    rows, sequences, nodes, places = [], [], [], []
    count = 0
    for index, (text, mine) in enumerate(zip(texts, chains, strict=True)):
        clean = text.tokens[text.first - 1 : -1]
        ids, parents = list(clean), list(range(-1, len(clean) - 1))
        for start, length in mine:
            above = start - text.first
            for place, token in enumerate(tokens.chain(length)):
                nodes.append(count + len(ids))
                places.append((index, start + place))
                ids.append(token)
                parents.append(above)
                above = len(ids) - 1
        rows.append((ids, parents))
        sequences.append(text.tokens[: text.first])
        count += len(ids)
    ends = DraftTree.from_rows([([text.tokens[-2]], [-1]) for text in texts])
    with runner.active():
        with torch.no_grad():
            runner.forward(ends, [text.tokens[:-1] for text in texts])
            runner.keep([[] for _ in texts])
        # From here on the answer counts as nodes that have run already.
        runner.stored = [text.first - 1 for text in texts]
        return runner.forward(DraftTree.from_rows(rows), sequences, nodes).logits, places


@torch.no_grad()
def agreement(
    model: PreTrainedModel,
    tokens: AdaptiveTokens,
    texts: Sequence[Text],
    length: int,
    num_positions: int,
) -> dict[str, float]:
    """How often chains behind clean text foretell what the target said.

    Args:
        model: the target.
        tokens: its adaptive tokens.
        texts: answers that were not learned from.
        length: of the chains.
        num_positions: per text, evenly spread; positions near the end have shorter chains.

    Returns:
        "slot_j", the share of right tokens at the j-th adaptive token; "slot_j_given", among those
        whose slots before it are right; "accepted", right tokens per chain before the first wrong
        one; "tokens_per_forward", 1 + accepted / 2, what the published loop gives of that.
    """
    right: list[list[bool]] = []
    for begin in range(0, len(texts), EVALUATED):
        batch = texts[begin : begin + EVALUATED]
        chains = [_spread(text, length, num_positions) for text in batch]
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


def _spread(text: Text, length: int, count: int) -> list[tuple[int, int]]:
    free = text.free()
    places = free.nonzero()[:, 0]
    picked = torch.linspace(0, len(places) - 1, min(count, len(places))).round().long()
    return [(p, window_length(free, p, length)) for p in places[picked].tolist()]
