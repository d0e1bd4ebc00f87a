"""Matmuls by weight format: every implementation runs for every row count and is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the extra 'bnb'")

from examples.studies.kernels import formats
from tests.compiler import needs_compiler

FORMS = {
    "int8, weights only": ["torchao", "_weight_int8pack_mm", "hf_spec"],
    "int8, Linear8bitLt": ["bitsandbytes", "hf_spec"],
}


@pytest.mark.full
@needs_compiler
def test_command(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ((64, 128), (128, 64))
    monkeypatch.setattr(formats, "SIZES", sizes)
    monkeypatch.setattr(formats, "ROWS", (1, 3))
    out = tmp_path / "formats.json"
    chosen = [part for name in FORMS for part in ("--format", name)]
    formats.main([*chosen, "--megabytes", "1", "--repeats", "2", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| weights | rows | 1 | 3 |")
    pairs = [(name, form) for name, forms in FORMS.items() for form in forms]
    assert [tuple(line.strip("| ").split(" | ")[:2]) for line in lines[2:]] == pairs
    written = json.loads(out.read_text())["formats"]
    assert written.keys() == FORMS.keys()
    for name, forms in FORMS.items():
        # One byte per element, plus the scales.
        count = written[name]["decoder_layers"]
        assert written[name]["bytes"] > count * sum(n * k for n, k in sizes)
        for by_form in written[name]["seconds"].values():
            assert list(by_form) == forms
            assert all(len(runs) == 2 for runs in by_form.values())
