"""What a model is called: its Hub id wherever that can be known without asking the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from hf_spec import SpecAdapter
from hf_spec.adapters.base_name import base_name, is_hub_id, local_name
from hf_spec.adapters.folder import BaseModel
from hf_spec.common.small_models import GEMMA3, SMOLLM2
from tests.adapters.samples import fresh_model, sample
from tests.tiny_models import repetitive_prompt


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
    # Records of trainings tell it from the original.
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
    """From the Hub's cache, as PEFT looks for it."""
    # Without it transformers asks the Hub for an adapter, and again and again where none answers.
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
