"""ALiBi from key positions: the model's own bias on a chain, and patches that are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from hf_spec.engine.models.internal_positions import tree_alibi, uses_alibi
from tests import tiny_models
from tests.model_watch import snapshot

MODELS = ("bloom", "falcon_alibi")
OWN_BUILDERS: dict[str, Callable[..., Tensor]] = {
    "bloom": modeling_bloom.build_alibi_tensor,
    "falcon_alibi": modeling_falcon.build_alibi_tensor,
}


def active_builder(name: str) -> Any:
    """Return the builder that the model would call now."""
    if name == "bloom":
        return tiny_models.build(name).transformer.build_alibi_tensor
    return modeling_falcon.build_alibi_tensor


def test_only_models_with_alibi_use_it() -> None:
    using = {n for n in tiny_models.ARCHITECTURES if uses_alibi(tiny_models.build(n))}
    assert using == set(MODELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads", [4, 6, 16])
@pytest.mark.parametrize("name", MODELS)
def test_a_chain_gets_the_bias_of_the_model(name: str, num_heads: int, dtype: torch.dtype) -> None:
    """All bits are equal, even past position 256, where Falcon's bfloat16 starts to round."""
    length = 700
    expected = OWN_BUILDERS[name](torch.ones(2, length, dtype=torch.long), num_heads, dtype)
    with tree_alibi(tiny_models.build(name), torch.arange(length).repeat(2, 1)):
        bias = active_builder(name)(torch.ones(2, 1, 1, 1), num_heads, dtype)
    assert bias.shape == expected.shape
    assert bias.dtype == expected.dtype
    assert torch.equal(bias, expected)


@pytest.mark.parametrize("name", MODELS)
def test_branches_get_the_bias_of_their_depth(name: str) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 3, 4, 3], [0, 1, 1, 1, 2, 2, 3]])
    chain = OWN_BUILDERS[name](torch.ones(1, 5, dtype=torch.long), 4, torch.float32)[:, 0]
    with tree_alibi(tiny_models.build(name), positions):
        bias = active_builder(name)(torch.ones(1), 4, torch.float32)
    for row, own in zip(bias.reshape(2, 4, -1), positions, strict=True):
        assert torch.equal(row, chain[:, own])


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", MODELS)
def test_the_patch_is_undone(name: str, error: type[BaseException] | None) -> None:
    model = tiny_models.build(name)
    before, function = snapshot(model), modeling_falcon.build_alibi_tensor
    inside = None
    try:
        with tree_alibi(model, torch.arange(3)[None]):
            inside = active_builder(name)
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as caught:
        assert type(caught) is error  # noqa: PT017 - both ways out are one test
    assert inside is not None
    assert inside is not active_builder(name)
    assert modeling_falcon.build_alibi_tensor is function
    assert snapshot(model) == before


def test_a_builder_set_by_others_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = tiny_models.build("bloom").transformer
    monkeypatch.setattr(transformer, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)
    with tree_alibi(tiny_models.build("bloom"), torch.arange(3)[None]):
        assert transformer.build_alibi_tensor is not modeling_bloom.build_alibi_tensor
    assert transformer.build_alibi_tensor is modeling_bloom.build_alibi_tensor


@pytest.mark.parametrize("name", ["llama", "falcon_mqa"])
def test_models_without_alibi_are_not_touched(name: str) -> None:
    model = tiny_models.build(name)
    before, function = snapshot(model), modeling_falcon.build_alibi_tensor
    with tree_alibi(model, torch.arange(3)[None]):
        assert snapshot(model) == before
        assert modeling_falcon.build_alibi_tensor is function
