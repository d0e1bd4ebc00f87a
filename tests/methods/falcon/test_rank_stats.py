"""Ranks along the true path equal those of real drafts."""

from __future__ import annotations

import pytest
import torch

from hf_spec.methods.falcon import rank_stats as falcon_ranks
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.falcon.rank_stats import ranks_along
from tests.falcon_reference import block_ends, features_of, predicted, random_head
from tests.tiny_models import build, settled_prompt

DEPTH = 6


@pytest.mark.parametrize(
    ("name", "size", "recurrent"),
    [
        ("llama", 1, True),
        ("llama", 2, False),
        ("llama", 3, True),
        ("llama", 4, False),
        ("gemma3", 2, True),
        ("gemma3", 3, False),
    ],
)
def test_against_one_draft_at_a_time(
    name: str, size: int, recurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(falcon_ranks, "STARTS_AT_ONCE", 5)
    head = random_head(name, size, 2, recurrent)
    tokens = settled_prompt(name)[0].tolist()
    features = features_of(build(name), tokens)
    starts = [*range(12), 29, 17, 40]
    ranks = ranks_along(head, tokens, features, starts, DEPTH)
    for start, found in zip(starts, ranks.tolist(), strict=True):
        if start < size:
            assert found == [-1] * DEPTH
            continue
        ends = block_ends(start, size)
        for done in range(0, DEPTH, size):
            path = tokens[start + 1 : start + 1 + done]
            outputs = predicted(head, tokens[: start + 1], features[:start], path, ends)
            logits = head.head.draft_logits(outputs)
            for slot in range(min(size, DEPTH - done)):
                true = tokens[start + 1 + done + slot]
                expected = int((logits[slot] > logits[slot, true] + 1e-4).sum())
                assert found[done + slot] in (expected, expected + 1)


def test_tokens_that_the_head_does_not_know() -> None:
    tokens = settled_prompt("llama")[0].tolist()
    known = torch.tensor(sorted(set(tokens[::2])))
    head = FalconHead(build("llama"), FalconShape(2, 1), known).eval()
    starts = list(range(2, 30))
    ranks = ranks_along(head, tokens, features_of(build("llama"), tokens), starts, 3)
    for start, found in zip(starts, ranks.tolist(), strict=True):
        for depth, rank in enumerate(found):
            assert (rank >= 0) == (tokens[start + 1 + depth] in known)
            assert rank < len(known)


@pytest.mark.parametrize(("start", "positions"), [(-1, 20), (18, 20), (5, 4)])
def test_drafts_beyond_the_text_are_refused(start: int, positions: int) -> None:
    tokens = settled_prompt("llama")[0, :20].tolist()
    features = features_of(build("llama"), tokens)[:positions]
    with pytest.raises(ValueError, match="does not fit"):
        ranks_along(random_head("llama"), tokens, features, [start], 2)
