"""The Markov and confidence heads of DSpark compared with plain torch."""

from __future__ import annotations

import pytest
import torch

from hf_spec.methods.block.markov import ConfidenceHead, MarkovHead, expected_tensors
from tests.feature_reference import RANK, SIZE, block_tensors, markov_bias
from tests.tiny_models import VOCAB


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_biases_along_a_block(kind: str) -> None:
    tensors = block_tensors(markov=kind)
    head = MarkovHead(tensors)
    assert (head.gate is not None, head.joint is not None) == (kind == "gated", kind == "rnn")
    outputs = torch.randn(4, 2, SIZE, generator=torch.Generator().manual_seed(1))
    mine, states = torch.zeros(2, RANK), [torch.zeros(RANK)] * 2
    for place, tokens in enumerate(([3, 8], [5, 8], [90, 0], [3, 3])):
        bias, mine = head(head.embed(torch.tensor(tokens)), outputs[place], mine)
        for row, token in enumerate(tokens):
            wanted, states[row] = markov_bias(tensors, token, outputs[place, row], states[row])
            assert (bias[row] - wanted).abs().max() < 1e-5
    assert bool(mine.any()) == (kind == "rnn")


@pytest.mark.parametrize("markov", [None, "vanilla"])
def test_confidence(markov: str | None) -> None:
    tensors = block_tensors(markov=markov, confidence=True)
    head = ConfidenceHead(tensors, SIZE)
    assert head.reads_token == (markov is not None)
    outputs, before = torch.randn(3, SIZE), torch.randn(3, RANK) if markov else None
    read = outputs if before is None else torch.cat([outputs, before], dim=-1)
    weight, bias = (tensors[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
    wanted = (read @ weight[0] + bias).sigmoid()
    assert torch.allclose(head(outputs, before), wanted, atol=1e-6)


@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_shapes_follow_from_the_tensors(kind: str | None) -> None:
    tensors = block_tensors(markov=kind, confidence=True)
    mine = {k: tuple(t.shape) for k, t in tensors.items() if "markov" in k or "confidence" in k}
    assert expected_tensors(tensors, SIZE, VOCAB, VOCAB) == mine


def test_a_head_without_its_table_lacks_it() -> None:
    tensors = block_tensors(markov="gated")
    del tensors["markov_head.markov_w1.weight"]
    assert "markov_head.markov_w1.weight" in expected_tensors(tensors, SIZE, VOCAB, VOCAB)
