"""Ranks of a text's true tokens in the lists of a head.

Trees are built from these ranks: `best_tree` takes the frequency of every path of ranks, and
returns the tree with the most tokens per time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_spec.engine.forward.attention_span import Segment
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead, PairHead, State
from hf_spec.methods.feature_pairs.runner import (
    HeadRunner,
    PairRow,
    joined_states,
    newest_segment,
)

# Drafts that run at once; limits the size of their masks.
STARTS_AT_ONCE = 128


@torch.no_grad()
def ranks_along(
    head: PairHead, tokens: Sequence[int], features: Tensor, starts: Sequence[int], depth: int
) -> Tensor:
    """Return the ranks of the true tokens in the lists that drafts along the true path would have.

    A draft of `depth` tokens from position p of `starts` reads the tokens up to p and the target's
    features before p, of (max(starts), H) or more. Its deeper passes read the true tokens, and the
    features that it predicted itself. The result is (len(starts), depth) int64; -1 for tokens
    outside the head's vocabulary, and for drafts that begin before there are k pairs, which cannot
    be made.
    """
    for start in starts:
        if not 0 <= start <= min(len(features), len(tokens) - 1 - depth):
            raise ValueError(
                f"a draft of {depth} tokens from position {start} does not fit {len(tokens)} "
                f"tokens with {len(features)} features"
            )
    size = head.shape.block_size
    ranks = torch.full((len(starts), depth), -1)
    runner = HeadRunner(head, 1)
    with runner.active():
        mixed, states = _mix_all(head, tokens, features[: max(starts, default=0)])
        for remainder in range(size):
            # Drafts whose newest pairs end a block of the same grid share the pairs before them.
            grid = range(size + remainder, max(starts, default=0) + 1, size)
            aligned = [i for i, start in enumerate(starts) if start in grid]
            if not aligned:
                continue
            end = max(starts[i] for i in aligned)
            segment = runner.pair_segment(PairRow(0, features, 0), 0, end, 0)
            outputs = runner.attend(mixed[:end], [segment])
            for first in range(0, len(aligned), STARTS_AT_ONCE):
                some = aligned[first : first + STARTS_AT_ONCE]
                positions = torch.tensor([starts[i] for i in some])
                ranks[some] = _follow(runner, tokens, (outputs, states), positions, depth)
    return ranks


def _mix_all(
    head: PairHead, tokens: Sequence[int], features: Tensor
) -> tuple[Tensor, State | None]:
    """Return (n, H) mixed pairs, and the state after each of them, (2, n, H)."""
    device = head.attention.device
    ids = torch.tensor([tokens[1 : len(features) + 1]], dtype=torch.long, device=device)
    if not head.shape.recurrent:
        return head.mix(ids, features[None])[0][0], None
    mixed, states, state = [], [], None
    for position in range(len(features)):
        here = slice(position, position + 1)
        out, state = head.mix(ids[:, here], features[None, here], state)
        assert state is not None, "a recurrent head carries its state"
        mixed.append(out[0])
        states.append(state)
    return torch.cat(mixed), joined_states(states)


def _follow(
    runner: HeadRunner,
    tokens: Sequence[int],
    true_pairs: tuple[Tensor, State | None],
    starts: Tensor,
    depth: int,
) -> Tensor:
    """Return (S, depth) ranks of drafts from `starts`, all aligned to the same grid."""
    outputs, states = true_pairs
    head, size = runner.head, runner.head.shape.block_size
    text = torch.tensor(tokens)
    slots = torch.arange(size)
    predicted = outputs[starts[:, None] - size + slots]
    state = None if states is None else (states[0][:, starts - 1], states[1][:, starts - 1])
    ranks = []
    for done in range(0, depth, size):
        if done:
            taken = text[starts[:, None] + done - size + 1 + slots].to(predicted.device)
            mixed, state = head.mix(taken, predicted, state)
            segment = _segment(len(outputs), starts, done - size, size)
            predicted = runner.attend(mixed.flatten(0, 1), [segment]).view(mixed.shape)
        width = min(size, depth - done)
        truth = text[starts[:, None] + done + 1 + slots[:width]]
        ranks.append(_ranks(head.head, predicted[:, :width], truth))
    return torch.cat(ranks, dim=1)


def _ranks(reader: FewTokensHead, predicted: Tensor, truth: Tensor) -> Tensor:
    logits = reader.draft_logits(predicted).float()
    index = reader.indices()[truth].to(logits.device)
    true_logits = logits.gather(-1, index.clamp_min(0)[..., None])
    return torch.where(index >= 0, (logits > true_logits).sum(dim=-1), -1).cpu()


def _segment(num_pairs: int, starts: Tensor, depth: int, size: int) -> Segment:
    """Return blocks of many drafts; each sees its own text and its own earlier blocks."""
    count = len(starts)
    draft = torch.arange(count).repeat_interleave(size)
    slots = torch.arange(size).repeat(count)
    position = starts[draft] + depth + slots
    before = [starts[draft] + earlier + slots for earlier in range(0, depth, size)]
    drafts = draft.repeat(depth // size + 1)
    visible = torch.cat(
        [torch.arange(num_pairs) < starts[draft][:, None], draft[:, None] == drafts], dim=1
    )
    tail = torch.cat([torch.arange(num_pairs), *before, position])
    return newest_segment(0, 0, 0, tail, count * size, visible)
