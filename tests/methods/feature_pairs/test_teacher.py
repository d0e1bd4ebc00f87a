"""The target as a teacher: its distributions, and copies of its output head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec.methods.feature_pairs.teacher import Teacher, cross_entropy, output_rows
from hf_spec.training.features import Text
from hf_spec.training.pairs import read_pairs
from hf_spec.training.responses import Response
from tests.tiny_models import build

IDS = torch.tensor([4, 9, 60])


@pytest.mark.parametrize("vocabulary", [None, IDS])
@torch.no_grad()
def test_distributions_after_a_pair(vocabulary: Tensor | None) -> None:
    """Pair i has token i + 1, so the distribution is that of token i + 2."""
    model, tokens = build("llama"), [5, 6, 7, 8, 9, 10]
    pairs = read_pairs(model, [Text(Response("a", "t", tokens[:2], tokens[2:]))], 1)
    probs = Teacher(model, vocabulary).probs_at(pairs, pairs.rows, pairs.positions)
    logits = model(torch.tensor([tokens])).logits[0, 1:5]
    expected = logits if vocabulary is None else logits[:, vocabulary]
    torch.testing.assert_close(probs, expected.softmax(-1), atol=1e-5, rtol=1e-4)


def test_cross_entropy_is_least_for_the_distribution_itself() -> None:
    logits = torch.randn(3, 7)
    probs = logits.softmax(-1)
    entropy = -(probs * probs.log()).sum(-1)
    torch.testing.assert_close(cross_entropy(logits, probs), entropy)
    assert (cross_entropy(logits + torch.randn(3, 7), probs) > entropy).all()


@pytest.mark.parametrize("vocabulary", [None, IDS])
def test_rows_are_copies(vocabulary: Tensor | None) -> None:
    model = build("llama")
    own: Any = model.get_output_embeddings()
    rows = output_rows(model, vocabulary)
    assert torch.equal(rows, own.weight if vocabulary is None else own.weight[vocabulary])
    assert rows.data_ptr() != own.weight.data_ptr()
