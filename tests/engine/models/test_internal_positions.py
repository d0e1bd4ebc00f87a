"""Decoders that compute positions internally: the tokens of plain `generate()`, even in trees."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import UnsupportedError
from hf_spec.engine.models import internal_positions as own_positions
from hf_spec.engine.models.internal_positions import padding_of, tables_of
from tests import tiny_models
from tests.any_class import build
from tests.hybrid_models import inputs, speculate
from tests.model_watch import snapshot

# Position tables with and without an offset; one model takes no attention function.
KINDS = {
    "bart": "BartForCausalLM",
    "blenderbot": "BlenderbotForCausalLM",
    "mvp": "MvpForCausalLM",
}
NEW_TOKENS = 24


@cache
def model(kind: str) -> PreTrainedModel:
    return build(kind, KINDS[kind])


@pytest.mark.parametrize("lengths", [(15,), (17, 8, 3)], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_placed(kind: str, lengths: tuple[int, ...]) -> None:
    """In a ragged batch positions include the padding, as in plain `generate()`."""
    given, before = inputs(lengths), snapshot(model(kind))
    expected = model(kind).generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert len(set(expected[:, lengths[0] :].flatten().tolist())) >= 5
    output = speculate(model(kind), given, expected, branches=True)
    assert output.sequences.tolist() == expected.tolist()
    assert 0 < output.spec_stats.accepted_tokens < output.spec_stats.drafted_tokens
    assert snapshot(model(kind)) == before


def test_other_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above detects a tree with the positions that the model itself computes."""
    given = inputs((15,))
    expected = model("bart").generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    monkeypatch.setattr(
        own_positions._Lookup, "__call__", lambda self, *a, **k: self.plain(*a, **k)
    )
    output = speculate(model("bart"), given, expected, branches=True)
    assert output.sequences.tolist() != expected.tolist()


def test_padding_counts_where_there_is_a_table() -> None:
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert padding_of(model("bart"), mask) == [2, 0]
    assert padding_of(tiny_models.build("llama"), mask) == [0, 0]


def test_padding_between_tokens_is_refused() -> None:
    given = inputs((9,))
    given["attention_mask"][0, 4] = 0
    with pytest.raises(UnsupportedError, match="table of positions"):
        model("bart").generate(**given, max_new_tokens=4, spec_strategy="lookup")


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_models_that_take_positions_have_none(name: str) -> None:
    assert not tables_of(tiny_models.build(name))
