"""Signature and docstring of `generate()`: those of transformers plus the added arguments."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from inspect import Parameter
from typing import Any

import pytest
from transformers import GenerationConfig, GenerationMixin

import hf_spec
from hf_spec.generation.call_signature import ADDITIONS, describe
from hf_spec.generation.hook import StoredStrategy
from tests.tiny_models import build

ADDED = {
    "generate": ["spec_strategy", "assistant"],
    "generate_batch": ["spec_strategy", "assistant", "max_batch"],
}


@pytest.fixture(autouse=True)
def enabled_again() -> Iterator[None]:
    yield
    hf_spec.enable()


@pytest.mark.parametrize("name", ADDED)
def test_the_signature_is_that_of_transformers_and_ours(name: str) -> None:
    described = inspect.signature(getattr(GenerationMixin, name))
    text = inspect.getdoc(getattr(GenerationMixin, name)) or ""
    hf_spec.disable()
    original = inspect.signature(getattr(GenerationMixin, name))
    own = inspect.getdoc(getattr(GenerationMixin, name)) or ""
    parameters = list(described.parameters.values())
    *theirs, rest = original.parameters.values()
    assert parameters[: len(theirs)] == theirs
    assert parameters[-1] == rest
    ours = parameters[len(theirs) : -1]
    assert [p.name for p in ours] == ADDED[name]
    assert {p.kind for p in ours} == {Parameter.KEYWORD_ONLY}
    assert {p.default for p in ours} == {None}
    assert described.return_annotation == original.return_annotation
    # The docstring keeps its text and has every addition once, in the list of arguments.
    without = text
    for added in ADDED[name]:
        assert len(re.findall(rf"^ *{added} \(`", text, re.MULTILINE)) == 1
        without = re.sub(rf"^( *){added} \(`.*\n(\1    .*\n)+", "", without, flags=re.MULTILINE)
    assert without == own
    assert text.index("spec_strategy (`") < text.index("Return")
    assert "spec_strategy" not in own


def test_every_model_and_a_bound_method_show_it() -> None:
    model = build("llama")
    for method in (model.generate, type(model).generate):
        assert {"spec_strategy", "assistant"} <= set(inspect.signature(method).parameters)
    assert "spec_strategy" in (model.generate.__doc__ or "")


def test_a_call_binds_as_the_signature_says() -> None:
    bound = inspect.signature(build("llama").generate).bind(
        [[1]], spec_strategy="lookup", assistant=None, top_k=3
    )
    assert bound.arguments["spec_strategy"] == "lookup"
    assert bound.arguments["kwargs"] == {"top_k": 3}


def test_the_stored_strategy_is_typed() -> None:
    assert GenerationConfig.__annotations__["spec_strategy"] == StoredStrategy
    assert hf_spec.StrategyConfig in typing.get_args(StoredStrategy)
    config = GenerationConfig(spec_strategy="lookup")
    assert config.spec_strategy == "lookup"
    config.update(spec_strategy=hf_spec.LookupConfig(copy_length=4))
    assert config.spec_strategy == hf_spec.LookupConfig(copy_length=4)
    hf_spec.disable()
    assert "spec_strategy" not in GenerationConfig.__annotations__


@pytest.mark.parametrize("text", [None, "One line.", "One line.\n\n    Returns:\n        a list\n"])
def test_texts_without_the_usual_places(text: str | None) -> None:
    def original(self: Any, inputs: Any = None) -> int:
        return 1

    def wrapper(*args: Any, **kwargs: Any) -> int:
        return 1

    original.__doc__ = text
    describe(wrapper, original, "max_batch")
    assert list(inspect.signature(wrapper).parameters) == ["self", "inputs", "max_batch"]
    assert (wrapper.__doc__ or "").count(ADDITIONS["max_batch"][0]) == 1
    assert (text or "").splitlines()[:1] == (wrapper.__doc__ or "").splitlines()[: bool(text)]
