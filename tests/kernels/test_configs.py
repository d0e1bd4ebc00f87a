"""Tile sizes: tuned GPUs have their own; other GPUs use the defaults, which is logged once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_spec_kernels import configs


@pytest.fixture(autouse=True)
def nothing_read() -> Iterator[None]:
    configs._read.cache_clear()
    yield
    configs._read.cache_clear()


def test_a_tuned_gpu_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(configs, "device_name", lambda device: "some_gpu")
    (tmp_path / "op").mkdir()
    default = {"small": {"BLOCK": 16}, "large": {"BLOCK": 32}}
    configs.config_file("op", "default").write_text(json.dumps(default))
    configs.config_file("op", "some_gpu").write_text(json.dumps({"large": {"BLOCK": 64}}))
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert configs.config("op", "large", gpu) == {"BLOCK": 64}
    assert configs.config("op", "small", gpu) == {"BLOCK": 16}
    assert configs.config("op", "large", cpu) == {"BLOCK": 32}
    with configs.trying("op", {"BLOCK": 128}):
        assert configs.config("op", "small", gpu) == {"BLOCK": 128}
    assert configs.config("op", "small", gpu) == {"BLOCK": 16}


def test_an_untuned_gpu_is_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(configs, "device_name", lambda device: "never_seen")
    for _ in range(3):
        found = configs.config("verify_tree", "16bit", torch.device("cuda", 0))
    assert found == json.loads(configs.config_file("verify_tree", "default").read_text())["16bit"]
    assert [record.message for record in caplog.records if "never_seen" in record.message] == [
        "verify_tree has no tile sizes for never_seen and uses the defaults; to tune it, run in a "
        "checkout of hf-spec: python -m examples.studies.kernels.tune"
    ]
