"""4-bit matmuls by row count: only equal results are timed, and every run is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiler import needs_compiler

pytest.importorskip("bitsandbytes")

from examples.studies.kernels import four_bit

pytestmark = needs_compiler


@torch.no_grad()
def test_other_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = four_bit.layers([(64, 128)], nested=True, row_major=True)
    states = torch.randn(3, 128).bfloat16()
    four_bit.check(layer, states)
    monkeypatch.setattr(four_bit, "four_bit_forward", lambda layer, states: -layer(states))
    with pytest.raises(AssertionError, match="results differ by 2"):
        four_bit.check(layer, states)


@pytest.mark.parametrize("processor", [None, "native"])
def test_command(
    processor: str | None, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(four_bit, "SIZES", ((64, 128), (32, 64)))
    monkeypatch.setattr(four_bit.build, "FLAGS", four_bit.build.FLAGS)
    out = tmp_path / "four_bit.json"
    command = ["--num-layers", "2", "--rows", "1", "5", "--repeats", "2", "--out", str(out)]
    four_bit.main(command + (["--processor", processor] if processor else []))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| rows | 1 | 5 |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| bitsandbytes", "| hf_spec"]
    assert lines[4].startswith("plain read: ")
    written = json.loads(out.read_text())
    assert written["processor"] == processor
    if processor:
        # Codes of half a byte, and a float32 scale per 64 weights.
        assert written["bytes"] == 2 * (64 * 128 + 32 * 64) * (1 / 2 + 4 / 64)
    assert [len(runs) for forms in written["seconds"].values() for runs in forms.values()] == [
        2
    ] * 4
    assert len(written[four_bit.READ]) == 2
