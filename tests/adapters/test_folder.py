"""Adapter folders: saving and loading, and error messages that name the problem."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_spec import AssistantError
from hf_spec.adapters.adapter import CONFIG_NAME, WEIGHTS_NAME, BaseModel, save_adapter
from hf_spec.adapters.folder import (
    LAYER_NAME,
    SpecAdapter,
    active_adapters,
    beside,
    is_adapter,
    load_adapter,
)
from hf_spec.generation.peft_type import SpecLayer, spec_layer
from tests.adapters.samples import sample
from tests.tiny_models import build


@pytest.fixture
def adapter() -> SpecAdapter:
    tensors = {"weight": torch.randn(3, 4), "half": torch.randn(5).bfloat16()}
    return SpecAdapter("draft", BaseModel.of(build("llama")), {"rank": 4, "list": [1]}, tensors)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_NAME
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


class TestRoundTrip:
    def test_everything_comes_back(self, tmp_path: Path, adapter: SpecAdapter) -> None:
        save_adapter(tmp_path / "new", adapter)
        found = load_adapter(tmp_path / "new", "draft")
        assert (found.method, found.options, found.base) == ("draft", adapter.options, adapter.base)
        assert found.folder == tmp_path / "new"
        assert found.tensors.keys() == adapter.tensors.keys()
        for name, tensor in adapter.tensors.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert torch.equal(found.tensors[name], tensor)

    def test_the_folder_has_the_shape_of_peft(self, tmp_path: Path, adapter: SpecAdapter) -> None:
        save_adapter(tmp_path, adapter)
        found = sorted(p.name for p in tmp_path.iterdir())
        assert found == sorted([CONFIG_NAME, WEIGHTS_NAME, "custom_generate"])
        config = json.loads((tmp_path / CONFIG_NAME).read_text())
        assert config["peft_type"] == "HF_SPEC"
        assert config["base_model_name_or_path"] == adapter.base.name

    def test_it_is_recognized(self, tmp_path: Path, adapter: SpecAdapter) -> None:
        assert not is_adapter(tmp_path)
        save_adapter(tmp_path, adapter)
        assert is_adapter(tmp_path)
        assert is_adapter(str(tmp_path))
        assert not is_adapter(build("llama"))
        edit_config(tmp_path, peft_type="LORA")
        assert not is_adapter(tmp_path)


class TestDamage:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"peft_type": "LORA"}, "type 'LORA'"),
            ({"peft_type": None}, "has no peft_type"),
            ({"options": None}, "lacks options"),
            ({"base": {"fingerprint": []}}, "incomplete"),
        ],
    )
    def test_a_wrong_config(
        self, tmp_path: Path, adapter: SpecAdapter, changes: dict[str, Any], message: str
    ) -> None:
        save_adapter(tmp_path, adapter)
        edit_config(tmp_path, **changes)
        with pytest.raises(AssistantError, match=message):
            load_adapter(tmp_path)

    @pytest.mark.parametrize("length", [0, 31, 33])
    def test_a_fingerprint_of_another_length(
        self, tmp_path: Path, adapter: SpecAdapter, length: int
    ) -> None:
        base = replace(adapter.base, fingerprint=(adapter.base.fingerprint * 2)[:length])
        save_adapter(tmp_path, replace(adapter, base=base))
        with pytest.raises(AssistantError, match=rf"by {length} weights, not 32: get the file"):
            load_adapter(tmp_path)

    def test_another_method(self, tmp_path: Path, adapter: SpecAdapter) -> None:
        save_adapter(tmp_path, adapter)
        with pytest.raises(AssistantError, match="method 'draft', not 'disco'"):
            load_adapter(tmp_path, "disco")

    def test_no_json(self, tmp_path: Path, adapter: SpecAdapter) -> None:
        save_adapter(tmp_path, adapter)
        (tmp_path / CONFIG_NAME).write_text("{")
        with pytest.raises(AssistantError, match="is not JSON"):
            load_adapter(tmp_path)

    def test_cut_off_weights(self, tmp_path: Path, adapter: SpecAdapter) -> None:
        save_adapter(tmp_path, adapter)
        weights = tmp_path / WEIGHTS_NAME
        weights.write_bytes(weights.read_bytes()[:-4])
        with pytest.raises(AssistantError, match="cannot be read"):
            load_adapter(tmp_path)

    def test_a_pickle_is_never_loaded(self, tmp_path: Path, adapter: SpecAdapter) -> None:
        save_adapter(tmp_path, adapter)
        (tmp_path / WEIGHTS_NAME).rename(tmp_path / "adapter_model.bin")
        with pytest.raises(AssistantError, match="pickle file, which is never loaded"):
            load_adapter(tmp_path)

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(AssistantError, match="has no adapter_config"):
            load_adapter(tmp_path)

    def test_neither_folder_nor_hub_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(AssistantError, match="neither a folder"):
            load_adapter("no/such-adapter-anywhere")


class TestBeside:
    @pytest.mark.parametrize(
        ("name", "repo_id", "expected"),
        [
            ("../draft", None, "here/draft"),
            ("inner", None, "here/adapter/inner"),
            ("../nowhere", None, "../nowhere"),
            ("../draft", "org/disco", "org/draft"),
            ("org/draft", "org/disco", "org/draft"),
            ("org/draft@v1", None, "org/draft@v1"),
        ],
    )
    def test_neighbors(
        self,
        tmp_path: Path,
        adapter: SpecAdapter,
        name: str,
        repo_id: str | None,
        expected: str,
    ) -> None:
        for folder in ("here/adapter/inner", "here/draft"):
            (tmp_path / folder).mkdir(parents=True)
        mine = replace(adapter, folder=tmp_path / "here/adapter", repo_id=repo_id)
        if expected.startswith("here"):
            assert Path(beside(mine, name)).resolve() == (tmp_path / expected).resolve()
        else:
            assert beside(mine, name) == expected

    @pytest.mark.parametrize(
        "name", ["", ".", "..", "../..", "../../x", "/etc", "~/x", "a/../../x", "..\\x"]
    )
    def test_anywhere_else(self, adapter: SpecAdapter, name: str) -> None:
        with pytest.raises(AssistantError, match="neither a folder beside it nor a Hub id"):
            beside(adapter, name)


def test_the_class_reads_and_writes(tmp_path: Path, adapter: SpecAdapter) -> None:
    adapter.save_pretrained(tmp_path)
    assert SpecAdapter.from_pretrained(tmp_path).options == adapter.options


@pytest.fixture
def layer() -> SpecLayer:
    layer = SpecLayer()
    layer.adapters = {"a": sample("falcon"), "b": sample("disco")}
    return layer


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", ["a"]),
        (["b", "a"], ["b", "a"]),
        # Names of other adapters, such as a LoRA, are ignored.
        ("lora", ["b"]),
        (["lora", "a"], ["a"]),
        ([], []),
    ],
)
def test_choosing(layer: SpecLayer, names: Any, expected: list[str]) -> None:
    layer.set_adapter("b")
    layer.set_adapter(names)
    assert layer.active == [layer.adapters[name] for name in expected]


def test_switching_off_and_deleting(layer: SpecLayer) -> None:
    layer.set_adapter("a")
    layer.enable_adapters(False)
    assert layer.active == []
    layer.enable_adapters(True)
    assert layer.active == [sample("falcon")]
    with pytest.warns(UserWarning, match="is now deleted"):
        layer.delete_adapter("a")
    assert layer.active == [sample("disco")]
    layer.delete_adapter("b")
    assert layer.active == []


def test_it_has_no_weights(layer: SpecLayer) -> None:
    assert layer.state_dict() == {}
    assert list(layer.parameters()) == []
    assert layer.weight is None
    assert repr(layer) == "SpecLayer(a: falcon, b: disco)"


def test_models_with_and_without(layer: SpecLayer) -> None:
    model = nn.Linear(2, 2)
    assert spec_layer(model) is None
    assert active_adapters(model) == []
    setattr(model, LAYER_NAME, layer)
    layer.set_adapter("a")
    assert spec_layer(model) is layer
    assert active_adapters(model) == [sample("falcon")]
