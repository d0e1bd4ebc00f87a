"""Adapters: the record of their method, and the check of their base model."""

from __future__ import annotations

import ast
import copy
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from packaging.requirements import Requirement
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec import AssistantError, AutoConfig, SpecAdapter
from hf_spec.adapters import adapter as adapters
from hf_spec.adapters.adapter import (
    FILES,
    AdapterMethod,
    BaseModel,
    base_name,
    is_hub_id,
    known_methods,
    local_name,
    register_method,
    save_adapter,
)
from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import load_adapter
from hf_spec.common.installing import how_to_install
from hf_spec.common.small_models import GEMMA3, SMOLLM2
from hf_spec.methods.loading import adapter_module, cached_adapter, find_assistant
from tests import tiny_models
from tests.adapters.samples import fresh_model, sample
from tests.tiny_models import repetitive_prompt

# The complete code of a new method.
THROWAWAY = """
from hf_spec.adapters.adapter import AdapterMethod, register_method

class Biases:
    def __init__(self, adapter, target):
        self.values = adapter.tensors["biases"].to(target.dtype)

register_method(AdapterMethod("throwaway", "lookup", "Biases for {}", Biases))
"""


@pytest.fixture
def throwaway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(adapters, "_METHODS", dict(adapters._METHODS))
    (tmp_path / "throwaway_method.py").write_text(THROWAWAY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("throwaway_method")
    del sys.modules["throwaway_method"]


class TestMethods:
    def test_those_that_there_are(self) -> None:
        assert known_methods() == ["disco", "draft", "falcon", "sdsat"]
        assert {name: sample(name).strategy for name in known_methods()} == {
            "disco": "disco",
            "draft": "tree",
            "falcon": "falcon",
            "sdsat": "sdsat",
        }

    def test_an_unknown_one_is_answered_with_all(self) -> None:
        other = replace(sample("draft"), method="medusa")
        with pytest.raises(AssistantError, match="known methods: disco, draft, falcon, sdsat"):
            other.strategy  # noqa: B018 - it is asked for its error

    def test_a_name_is_taken_once(self) -> None:
        with pytest.raises(ValueError, match="'falcon' already"):
            register_method(AdapterMethod("falcon", "lookup", "{}", lambda adapter, target: None))

    def test_a_new_one_needs_a_module_with_its_record(
        self, tmp_path: Path, throwaway: ModuleType
    ) -> None:
        """Such an adapter can be saved, loaded, built, given a card, and found on a model."""
        model: Any = fresh_model()
        values = torch.arange(4.0)
        new = SpecAdapter("throwaway", BaseModel.of(model), {"held_back": {"tau": 1.5}}, {})
        new.tensors["biases"] = values
        save_with_card(tmp_path / "mine", new)
        card = ModelCard.load(tmp_path / "mine/README.md")
        assert f"# Biases for {new.base.name}" in card.text
        assert 'spec_strategy="lookup", assistant=adapter' in card.text
        assert "| `tau` | 1.5 |" in card.text
        assert card.data.tags == ["speculative-decoding", "throwaway"]
        loaded = load_adapter(tmp_path / "mine", "throwaway")
        assert loaded.strategy == "lookup"
        built = cached_adapter(loaded, model)
        assert isinstance(built, throwaway.Biases)
        assert torch.equal(built.values, values)
        assert cached_adapter(loaded, model) is built
        by_name = adapter_module(tmp_path / "mine", "throwaway", model)
        assert torch.equal(by_name.values, values)
        model.load_adapter(str(tmp_path / "mine"))
        attached = find_assistant(None, model, AutoConfig.adapter_methods)
        assert attached.method == "throwaway"

    def test_what_its_maker_stumbles_over_is_damage(self, throwaway: ModuleType) -> None:
        lacking = SpecAdapter("throwaway", BaseModel.of(fresh_model()), {}, {})
        with pytest.raises(AssistantError, match="throwaway adapter '' is damaged: 'biases'"):
            cached_adapter(lacking, fresh_model())


def test_only_a_saved_adapter_has_a_folder_of_its_own(tmp_path: Path) -> None:
    save_adapter(tmp_path, sample("draft"))
    loaded = load_adapter(tmp_path)
    assert loaded.own_folder == tmp_path
    for other in (sample("draft"), replace(loaded, repo_id="org/draft")):
        with pytest.raises(AssistantError, match="save it to one first"):
            other.own_folder  # noqa: B018 - it is asked for its error


class TestBase:
    def test_its_own_model_in_any_dtype(self) -> None:
        model = tiny_models.build("llama")
        base = BaseModel.of(model)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            base.check(copy.deepcopy(model).to(dtype))

    def test_its_own_model_with_an_embedding_of_8_bits(self) -> None:
        """Embeddings as in GGUF files: 8-bit integers with a scale for every 32 weights."""
        model = tiny_models.build("llama", seed=3)
        weight = model.get_input_embeddings().weight
        with torch.no_grad():
            # In trained embeddings, a few weights are much larger than the rest of their block.
            weight[:, 3] = 6 * weight.std()
        base = BaseModel.of(model)
        stored = copy.deepcopy(model)
        table = stored.get_input_embeddings().weight
        scale = table.detach().reshape(-1, 32).abs().amax(dim=1, keepdim=True) / 127
        with torch.no_grad():
            # Rounding changes a weight by at most half a step.
            table += (0.5 * scale).expand(-1, 32).reshape(table.shape)
        base.check(stored)

    def test_the_same_sizes_with_other_weights(self) -> None:
        with pytest.raises(AssistantError, match="other weights"):
            BaseModel.of(tiny_models.build("llama")).check(tiny_models.build("llama", seed=1))

    def test_another_size(self) -> None:
        model = tiny_models.build("llama")
        base = replace(BaseModel.of(model), num_layers=30)
        with pytest.raises(AssistantError, match=r"num_layers 30; .* has 3"):
            base.check(model)


def test_the_files_of_custom_generate_are_written_and_replaced(tmp_path: Path) -> None:
    save_adapter(tmp_path, sample("draft"))
    (tmp_path / "custom_generate/generate.py").write_text("changed")
    (tmp_path / "custom_generate/mine.txt").write_text("kept")
    save_adapter(tmp_path, sample("draft"))
    found = {path.name: path.read_text() for path in (tmp_path / "custom_generate").iterdir()}
    assert found == {**FILES, "mine.txt": "kept"}


def test_the_code_imports_one_function_and_does_nothing_else() -> None:
    body = ast.parse(FILES["generate.py"]).body
    kinds = [type(node) for node in body]
    assert kinds == [ast.Expr, ast.ImportFrom, ast.Assign]
    assert isinstance(body[1], ast.ImportFrom)
    names = body[1].names[0]
    assert (body[1].module, names.name, names.asname) == ("hf_spec", "custom_generate", "generate")
    assert callable(hf_spec.custom_generate)


def test_this_version_is_one_that_is_asked_for() -> None:
    comment, line = FILES["requirements.txt"].splitlines()
    assert comment == f"# To install it, {how_to_install()}."
    requirement = Requirement(line)
    assert requirement.name == "hf-spec"
    assert hf_spec.__version__ in requirement.specifier


def loaded_from(name: str | Path) -> Any:
    model = fresh_model()
    model.config.name_or_path = str(name)
    return model


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_the_hub_id_it_was_loaded_by() -> None:
    model = loaded_from("org/some-model.v2")
    assert (base_name(model), local_name(model)) == ("org/some-model.v2", "some-model.v2")


def test_a_snapshot_of_the_hubs_cache(tmp_path: Path) -> None:
    model = loaded_from(folder(tmp_path / "models--org--some-model/snapshots/0a1b"))
    assert base_name(model) == "org/some-model"


@pytest.mark.parametrize("source", [SMOLLM2, GEMMA3], ids=lambda source: source.folder)
def test_a_converted_checkpoint(tmp_path: Path, source: Any) -> None:
    model = loaded_from(folder(tmp_path / source.folder))
    assert base_name(model) == source.hub_id
    # Training records distinguish it from the original.
    assert local_name(model) == source.folder


def test_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "my/tuned")
    monkeypatch.chdir(tmp_path)
    assert base_name(loaded_from("my/tuned")) == "tuned"
    assert base_name(loaded_from(tmp_path / "my/tuned")) == "tuned"
    assert base_name(loaded_from("my/tuned/")) == "tuned"


def test_a_model_from_nowhere() -> None:
    assert base_name(loaded_from("")) == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["tuned", "/a/b", "a/b/c", "a/", "", "../b", "tuned/model dir"])
def test_what_is_no_hub_id(name: str) -> None:
    assert not is_hub_id(name)


def test_the_base_of_an_adapter_is_found_by_its_name_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is found in the Hub's cache, as in PEFT."""
    # Online, transformers would request an adapter from the Hub and retry without a connection.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--tiny"
    fresh_model().save_pretrained(folder(repository / "snapshots/0a1b"))
    (folder(repository / "refs") / "main").write_text("0a1b")
    local: dict[str, Any] = {"cache_dir": tmp_path, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained("org/tiny", **local)
    sdsat = sample("sdsat")
    adapter = SpecAdapter("sdsat", BaseModel.of(model), sdsat.options, sdsat.tensors)
    adapter.save_pretrained(tmp_path / "mine")
    found = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "mine"), **local)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    drafted = found.generate(repetitive_prompt(), spec_strategy="sdsat", **options)
    assert torch.equal(drafted, fresh_model().generate(repetitive_prompt(), **options))
