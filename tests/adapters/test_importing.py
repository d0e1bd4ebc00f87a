"""Conversion of published pickles: only on request, only tensors, no code execution."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, OptionError
from hf_spec.adapters.importing import import_head
from hf_spec.adapters.published import read_published
from tests.published_heads import plain_config, sample


class Planted:
    """Object that creates a file when an unsafe unpickler loads it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def folder(path: Path, content: Any, config: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or plain_config()))
    torch.save(content, path / "pytorch_model.bin")
    return path


def test_a_head_is_converted(tmp_path: Path) -> None:
    tensors = sample("eagle3").tensors
    shared = {**tensors, "again": tensors["norm.weight"]}
    source = folder(tmp_path / "source", shared)
    (source / "README.md").write_text("---\nlicense: llama3\n---\ntext")
    out = import_head(source, tmp_path / "out")
    found = read_published(out)
    assert found is not None
    assert found.config == plain_config()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in shared.items())
    card = (out / "README.md").read_text()
    assert "license: llama3" in card
    assert str(source) in card
    assert "`pytorch_model.bin`" in card
    with pytest.raises(OptionError, match="new or empty"):
        import_head(source, out)


def test_nothing_is_executed(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    source = folder(tmp_path / "source", {"x": torch.ones(1), "y": Planted(witness)})
    with pytest.raises(AssistantError, match="cannot be read as tensors alone"):
        import_head(source, tmp_path / "out")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Planted(witness)))
    with pytest.raises(AssistantError, match="cannot be read as tensors alone"):
        import_head(source, tmp_path / "out")
    assert not witness.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [{"x": 3}, [torch.ones(1)], {3: torch.ones(1)}])
def test_other_contents(content: Any, tmp_path: Path) -> None:
    with pytest.raises(AssistantError, match="more than named tensors"):
        import_head(folder(tmp_path / "source", content), tmp_path / "out")


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.float64), torch.empty(2, device="meta")],
)
def test_tensors_that_are_no_weights(tensor: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(AssistantError, match=r"'x' is of .* not a plain weight"):
        import_head(folder(tmp_path / "source", {"x": tensor}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_head(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", {}, {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(AssistantError, match="not a published head"):
        import_head(source, tmp_path / "out")
    (source / "config.json").write_text(json.dumps(plain_config()))
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(AssistantError, match="nothing needs converting"):
        import_head(source, tmp_path / "out")
