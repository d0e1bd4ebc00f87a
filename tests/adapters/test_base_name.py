"""What a model is called: its Hub id wherever that can be known without asking the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_spec.adapters.base_name import base_name, is_hub_id, local_name
from hf_spec.checkpoints import GEMMA3, SMOLLM2
from tests.adapters.samples import fresh_model


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
