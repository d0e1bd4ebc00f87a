"""What all published heads share: dtypes, vocabularies, outputs."""

from __future__ import annotations

import pytest
import torch

from hf_spec import AssistantError
from hf_spec.models.published_weights import (
    OutputHead,
    fitted,
    head_dtype,
    linear,
    published_vocabulary,
)
from tests.feature_reference import published
from tests.tiny_models import VOCAB, build

MODEL = build("llama")


def vocabulary(offsets: torch.Tensor | None, known: int) -> torch.Tensor | None:
    tensors = {} if offsets is None else {"d2t": offsets}
    return published_vocabulary(published("dflash", {}, tensors), known, VOCAB)


def test_d2t_holds_offsets() -> None:
    tokens = torch.tensor([4, 7, 8, 96])
    found = vocabulary(tokens - torch.arange(4), 4)
    assert found is not None
    assert found.tolist() == tokens.tolist()


def test_d2t_may_be_absent_where_all_tokens_are_known() -> None:
    assert vocabulary(None, VOCAB) is None
    assert vocabulary(torch.zeros(VOCAB, dtype=torch.long), VOCAB).tolist() == list(range(VOCAB))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("offsets", "known", "match"),
    [
        (None, 4, "knows 4 of the target's 97 tokens and has no 'd2t'"),
        (torch.tensor([4, 7, 8, 96]), 4, "it holds offsets, not token ids"),
        (torch.tensor([-1, 0, 0, 0]), 4, "does not lead to 4 different tokens"),
        (torch.tensor([1, 0, 0, 0]), 4, "does not lead to 4 different tokens"),
        (torch.tensor([1.0, 0, 0, 0]), 4, "torch.float32, not one offset for each"),
        (torch.tensor([1, 0, 0]), 4, r"shape \(3,\)"),
    ],
)
def test_d2t_that_cannot_be(offsets: torch.Tensor | None, known: int, match: str) -> None:
    with pytest.raises(AssistantError, match=match):
        vocabulary(offsets, known)


def test_an_output_of_its_own_and_the_targets() -> None:
    tokens = torch.tensor([4, 7, 96])
    weight, hidden = torch.randn(3, 32), torch.randn(2, 32)
    own = OutputHead(MODEL, weight, tokens)(hidden)
    assert own.shape == (2, VOCAB)
    assert torch.allclose(own[:, tokens], hidden @ weight.T)
    assert own.isneginf().sum() == 2 * (VOCAB - 3)
    shared = OutputHead(MODEL)(hidden)
    assert torch.equal(shared, MODEL.lm_head(hidden))


def test_heads_never_compute_in_float16() -> None:
    assert head_dtype(MODEL) is torch.float32
    half = type(MODEL)(MODEL.config).to(torch.float16)
    assert head_dtype(half) is torch.bfloat16
    found = fitted(published("x", {}, {}), {"a": torch.ones(2)}, {"a": (2,)}, half)
    assert found["a"].dtype is torch.bfloat16
    # The target's own head goes on in its dtype.
    assert OutputHead(half)(torch.ones(1, 32, dtype=torch.bfloat16)).dtype is torch.float16


def test_a_layer_shares_its_weights() -> None:
    weight = torch.randn(2, 3)
    assert linear(weight).weight.data_ptr() == weight.data_ptr()
    assert not linear(weight, torch.zeros(2)).weight.requires_grad
