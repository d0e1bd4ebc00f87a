"""The draft head: the target's logits for tokens of its vocabulary, -inf for all others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hf_spec.methods.feature_pairs.draft_head import DraftHead


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_the_full_heads_or_impossible(bias: bool) -> None:
    full = nn.Linear(8, 20, bias=bias)
    vocabulary = torch.tensor([1, 4, 19])
    hidden = torch.randn(2, 3, 8)
    logits = DraftHead(full, vocabulary)(hidden)
    torch.testing.assert_close(logits[..., vocabulary], full(hidden)[..., vocabulary])
    others = [token for token in range(20) if token not in vocabulary]
    assert (logits[..., others] == float("-inf")).all()


def test_the_full_head_stays_as_it_was() -> None:
    full = nn.Linear(8, 20, bias=False)
    before = full.weight.clone()
    reduced = DraftHead(full, torch.tensor([0, 2]))
    with torch.no_grad():
        reduced.scores.weight.zero_()
    assert torch.equal(full.weight, before)


def test_without_a_vocabulary_the_head_is_shared() -> None:
    full = nn.Linear(8, 20)
    head = DraftHead(full, None)
    assert head.scores is full
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(head(hidden), full(hidden))


def test_the_bridge_comes_first() -> None:
    full = nn.Linear(8, 20)
    head = DraftHead(full, None)
    with torch.no_grad():
        head.bridge.weight.mul_(2)
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(head(hidden), full(2 * hidden))


def test_alone_gives_this_thread_the_logits_of_its_own_tokens() -> None:
    vocabulary = torch.tensor([1, 4, 19])
    full = nn.Linear(8, 20)
    head, other = DraftHead(full, vocabulary), DraftHead(full, vocabulary)
    hidden = torch.randn(2, 8)
    whole = head(hidden)
    with ThreadPoolExecutor(1) as pool, head.restrict_logits():
        assert torch.equal(head(hidden), whole[:, vocabulary])
        assert torch.equal(other(hidden), whole)
        assert torch.equal(pool.submit(head, hidden).result(), whole)
        with other.restrict_logits():
            assert head(hidden).shape == other(hidden).shape == (2, 3)
        with pytest.raises(RuntimeError), other.restrict_logits():
            other(hidden[:, :1])
        assert torch.equal(other(hidden), whole)
    assert torch.equal(head(hidden), whole)
