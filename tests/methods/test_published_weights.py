"""Functions for all published heads: dtypes, vocabularies, outputs."""

from __future__ import annotations

import pytest
import torch

from hf_spec import AssistantError
from hf_spec.methods.published_weights import (
    OutputHead,
    draft_vocab_ids,
    fitted,
    head_dtype,
    linear,
    with_offsets,
)
from tests.feature_reference import published
from tests.tiny_models import VOCAB, build

MODEL = build("llama")


def vocabulary(offsets: torch.Tensor | None, known: int) -> list[int] | None:
    found = draft_vocab_ids("the head", offsets, known, VOCAB)
    return None if found is None else found.tolist()


def test_d2t_holds_offsets() -> None:
    tokens = torch.tensor([4, 7, 8, 96])
    assert vocabulary(tokens - torch.arange(4), 4) == tokens.tolist()


def test_d2t_may_be_absent_where_all_tokens_are_known() -> None:
    assert vocabulary(None, VOCAB) is None
    assert vocabulary(torch.zeros(VOCAB, dtype=torch.long), VOCAB) is None
    # A small difference is padding.
    assert vocabulary(None, VOCAB - 3) == list(range(VOCAB - 3))


def test_a_mask_is_read_where_there_are_no_offsets() -> None:
    tokens = torch.tensor([4, 7, 96])
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[tokens] = True
    scores = {"lm_head.weight": torch.ones(3, 2)}
    found = with_offsets({**scores, "t2d": mask})
    assert found.keys() == {"lm_head.weight", "d2t"}
    assert vocabulary(found["d2t"], 3) == tokens.tolist()
    # Offsets take precedence, and a mask with another number of tokens than outputs is ignored.
    given = {"d2t": torch.tensor([1, 1, 1])}
    assert with_offsets({**scores, **given, "t2d": mask})["d2t"] is given["d2t"]
    for other in (mask.logical_not(), torch.zeros_like(mask)):
        assert with_offsets({**scores, "t2d": other}).keys() == scores.keys()
    assert with_offsets({"t2d": mask}) == {}


@pytest.mark.parametrize(
    ("offsets", "known", "match"),
    [
        (None, VOCAB + 2000, "outputs for 2097 of 97 tokens"),
        (torch.tensor([4, 7, 8, 96]), 4, "leads to token 99, but the target has 97"),
        (torch.tensor([-1, 0, 0, 0]), 4, "for another target"),
        (torch.tensor([1, 0, 0, 0]), 4, "leads to some tokens twice"),
        (torch.tensor([1.0, 0, 0, 0]), 4, "torch.float32, not 4 whole numbers"),
        (torch.tensor([1, 0, 0]), 4, r"d2t is \(3,\)"),
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
    # The target's own output head keeps its dtype.
    assert OutputHead(half)(torch.ones(1, 32, dtype=torch.bfloat16)).dtype is torch.float16


def test_a_layer_shares_its_weights() -> None:
    weight = torch.randn(2, 3)
    assert linear(weight).weight.data_ptr() == weight.data_ptr()
    assert not linear(weight, torch.zeros(2)).weight.requires_grad
