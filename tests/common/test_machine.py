"""Recorded properties of the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_spec.common import machine
from hf_spec.common.machine import environment, has_bfloat16


def test_environment() -> None:
    found = environment()
    assert found == json.loads(json.dumps(found))
    assert found["torch"] == torch.__version__
    assert found["cpu"]
    assert environment(torch.device("cpu"))["device"] == found["cpu"]
    # Outside a checkout both keys are missing.
    assert ("commit" in found) == ("commit_changed" in found)


@pytest.fixture
def asked_again() -> Iterator[None]:
    has_bfloat16.cache_clear()
    yield
    has_bfloat16.cache_clear()


@pytest.mark.usefixtures("asked_again")
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx512f", False),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("cpu MHz\t: 2800", True),
        (None, True),
    ],
)
def test_whether_it_multiplies_bfloat16(
    said: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if said is not None:
        file.write_text(f"model name : x\n{said}\n")
    monkeypatch.setattr(machine, "Path", lambda _: file)
    assert has_bfloat16() is expected
