"""The manager from which the handlers of transformers' server get their responses."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_spec import LookupConfig
from hf_spec.engine.fast.compiled_layers import CompiledLayers
from hf_spec.serving.errors import StoppedError
from hf_spec.serving.manager import RequestGeneration, SpeculativeManager
from hf_spec.serving.settings import ServeSettings
from tests import tiny_models
from tests.serving.conftest import plain, speller

TEXT = "bacabacaba"


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny_models.build("llama"))


def inputs(**more: Any) -> dict[str, Any]:
    return {**speller()(f"user{TEXT}", return_tensors="pt"), **more}


def answer(manager: SpeculativeManager, model: Any, given: dict[str, Any]) -> str:
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    config.spec_strategy = model.generation_config.spec_strategy  # type: ignore[attr-defined]
    generation = RequestGeneration(manager)
    generation.prepare(model, speller(), given, config)
    work = generation.generate_non_streaming(model, speller(), given, config, "name")
    text, prompt_len, tokens = asyncio.run(work)
    assert prompt_len == given["input_ids"].shape[1]
    assert len(tokens) == 12
    return text


def test_the_strategy_is_the_one_named_or_stored_or_auto(model: Any) -> None:
    def strategy(named: Any) -> str:
        manager = SpeculativeManager(named, None, ServeSettings())
        found = manager.open(model, speller()).generation.config.strategy
        manager.stop()
        return found

    assert strategy(None) == "auto"
    model.generation_config.spec_strategy = LookupConfig(match_length=3)
    assert strategy(None) == "lookup"
    assert strategy("none") == "none"


def test_prompts_with_more_than_text_run_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SpeculativeManager("lookup", None, ServeSettings())
    scheduler = manager.open(model, speller())
    assert answer(manager, model, inputs()) == plain(TEXT)
    assert scheduler.counts.generated_tokens == 12
    more = inputs(position_ids=torch.arange(6)[None])
    assert answer(manager, model, more) == plain(TEXT)
    assert scheduler.counts.generated_tokens == 12, "not in the batch"
    manager.stop()


def test_a_model_that_was_loaded_again_gets_its_own_thread(model: Any) -> None:
    manager = SpeculativeManager("lookup", None, ServeSettings())
    first = manager.open(model, speller())
    assert manager.open(model, speller()) is first
    second = manager.open(copy.deepcopy(model), speller())
    assert second is manager.scheduler is not first
    assert not first.is_alive
    manager.stop()


def test_layers_are_compiled_where_that_is_asked(model: Any) -> None:
    manager = SpeculativeManager(LookupConfig(compile=True), None, ServeSettings())
    manager.open(model, speller())
    compiled = CompiledLayers.of(model)
    assert [layer.is_compiled for layer in compiled.layers] == [True] * len(model.model.layers)
    assert answer(manager, model, inputs()) == plain(TEXT)
    manager.stop()


def test_a_closed_model_is_forgotten_and_opened_again() -> None:
    model: Any = copy.deepcopy(tiny_models.build("llama"))
    manager = SpeculativeManager("lookup", None, ServeSettings())
    first = manager.open(model, speller())
    manager.close()
    assert manager.scheduler is None
    assert manager.is_alive
    assert not first.is_alive
    dropped, again = weakref.ref(model), copy.deepcopy(model)
    del model, first
    gc.collect()
    assert dropped() is None
    assert manager.open(again, speller()).is_alive
    manager.stop()
    with pytest.raises(StoppedError):
        manager.open(again, speller())


def test_a_generation_per_request_and_its_health(model: Any) -> None:
    manager = SpeculativeManager("lookup", None, ServeSettings())
    manager.open(model, speller())
    one, other = manager.get_manager("any"), manager.get_manager("any", use_cb=True)
    assert isinstance(one, RequestGeneration)
    assert one is not other
    assert manager.is_alive
    manager.stop()
    assert not manager.is_alive
