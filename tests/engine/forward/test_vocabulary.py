"""Token ids and logits for vocabularies of different sizes."""

from __future__ import annotations

import pytest
import torch

from hf_spec.engine.forward.vocabulary import fit_logits, fit_tokens, num_embeddings
from tests.tiny_models import VOCAB, build, padded


@pytest.mark.parametrize("rows", [VOCAB, VOCAB + 31, VOCAB - 40])
def test_num_embeddings_counts_rows(rows: int) -> None:
    assert num_embeddings(padded(build("llama"), rows)) == rows


def test_tokens_beyond_the_last_row_are_read_as_it() -> None:
    assert fit_tokens(torch.tensor([[-2, 0, 7, 8, 99]]), 8).tolist() == [[-2, 0, 7, 7, 7]]


class TestLogits:
    logits = torch.tensor([[0.5, -1.0, 2.0]])

    def test_cut(self) -> None:
        assert fit_logits(self.logits, 2).tolist() == [[0.5, -1.0]]

    def test_filled_up_with_what_is_never_drawn(self) -> None:
        assert fit_logits(self.logits, 5).softmax(dim=-1)[0, 3:].tolist() == [0.0, 0.0]
        assert fit_logits(self.logits, 5)[0, :3].tolist() == self.logits[0].tolist()
