"""Published drafters: detection of the family, and damaged files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_spec import AssistantError
from hf_spec.adapters import published
from hf_spec.adapters.published import (
    PublishedFamily,
    published_family,
    read_published,
    read_weights,
    recognize,
    register_family,
)
from hf_spec.adapters.reading import MAX_CONFIG_BYTES
from tests.published_heads import plain_config, sample
from tests.tiny_models import build

CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())
NO_DRAFT_VOCABULARY = {k: v for k, v in plain_config().items() if k != "draft_vocab_size"}


@pytest.mark.parametrize(
    ("family", "config"), [one[1:] for one in CONFIGS], ids=[one[0] for one in CONFIGS]
)
def test_the_config_decides(family: str | None, config: dict[str, Any]) -> None:
    assert recognize(config) == family


def head(folder: Path, **files: Any) -> Path:
    """Write a config and the tensors of each named file, and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(plain_config()))
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


class TestRead:
    def test_a_head(self) -> None:
        known = sample("eagle3")
        found = read_published(known.folder)
        assert found is not None
        assert (found.family, found.record.strategy, found.name) == (
            "eagle3",
            "eagle",
            known.folder,
        )
        assert found.config == plain_config()
        weight = found.tensors["midlayer.hidden_norm.weight"]
        assert torch.equal(weight, known.tensors["layers.0.hidden_norm.weight"])
        assert found.tensors["t2d"].dtype == torch.bool

    def test_shards(self, tmp_path: Path) -> None:
        folder = head(tmp_path, **{"a-1": {"x": torch.ones(2)}, "a-2": {"y": torch.zeros(1)}})
        weight_map = {"x": "a-1.safetensors", "y": "a-2.safetensors"}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert sorted(read_weights(folder, "a")) == ["x", "y"]
        assert sorted(read_weights(folder, "a", lambda key: key == "y")) == ["y"]
        for lie in ({"x": "../x.safetensors"}, {"x": "a.bin"}, {"x": 3}, {}, [1]):
            index.write_text(json.dumps({"weight_map": lie}))
            with pytest.raises(AssistantError):
                read_weights(folder, "a")

    def test_whole_models_are_none(self, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path / "model")
        assert read_published(tmp_path / "model") is None
        # A single layer, but no layer that combines a token with a feature.
        single = head(tmp_path / "one", model={"lm_head.weight": torch.ones(2, 2)})
        (single / "config.json").write_text(json.dumps(NO_DRAFT_VOCABULARY))
        assert published_family(single) is None
        save_file({"fc.weight": torch.ones(2, 4)}, single / "model.safetensors")
        assert published_family(single) == "eagle"
        inside = head(tmp_path / "inside")
        (inside / "config.json").write_text('{"num_nextn_predict_layers": 1}')
        assert read_published(inside) is None

    def test_a_folder_without_a_config(self, tmp_path: Path) -> None:
        assert read_published(tmp_path) is None


class TestRefused:
    def test_a_pickle(self, tmp_path: Path) -> None:
        folder = head(tmp_path)
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(1))
        command = f"hf-spec import-head {folder} OUT"
        with pytest.raises(AssistantError, match=f"pytorch_model.bin is a pickle.*{command}"):
            read_published(folder)

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        folder = head(tmp_path, model={"x": torch.ones(64)})
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(AssistantError, match=r"model.safetensors cannot be read.*get the file"):
            read_published(folder)

    def test_no_numbers(self, tmp_path: Path) -> None:
        folder = head(tmp_path, model={"x": torch.tensor([1.0, torch.nan])})
        with pytest.raises(AssistantError, match="'x' holds NaN"):
            read_published(folder)
        save_file({"x": torch.ones(2, dtype=torch.float64)}, folder / "model.safetensors")
        with pytest.raises(AssistantError, match="'x' is of type F64"):
            read_published(folder)

    def test_configs(self, tmp_path: Path) -> None:
        config = head(tmp_path) / "config.json"
        for text in ("{", "[1]", " " * (MAX_CONFIG_BYTES + 1)):
            config.write_text(text)
            with pytest.raises(AssistantError, match=r"config\.json"):
                read_published(tmp_path)

    def test_a_link_out_of_the_folder(self, tmp_path: Path) -> None:
        folder = head(tmp_path / "head")
        save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
        (folder / "model.safetensors").symlink_to(tmp_path / "other.safetensors")
        with pytest.raises(AssistantError, match="link out of its folder"):
            read_published(folder)


class TestFamilies:
    def test_names_are_taken_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(published, "_FAMILIES", {})
        family = PublishedFamily("mine", "eagle", lambda head, target: None)
        register_family(family)
        with pytest.raises(ValueError, match="'mine' already"):
            register_family(family)

    def test_what_cannot_be_used_says_so(self, tmp_path: Path) -> None:
        folder = head(tmp_path, model={"x": torch.ones(1)})
        (folder / "config.json").write_text('{"hydra_num_heads": 4}')
        found = read_published(folder)
        assert found is not None
        with pytest.raises(AssistantError, match=r"Hydra heads cannot be used yet.*eagle3"):
            assert found.record
