"""`hf-spec shrink`: the same adapter in a smaller file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_spec import SpecAdapter
from hf_spec.adapters.adapter import WEIGHTS_NAME
from hf_spec.cli.app import build_app
from tests.adapters.samples import save_sample


@pytest.mark.parametrize("bits", [8, 4])
def test_the_file_is_smaller_and_the_rest_as_it_was(tmp_path: Path, bits: int) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    (folder / "README.md").write_text("A card.")
    before, size = SpecAdapter.from_pretrained(folder), (folder / WEIGHTS_NAME).stat().st_size
    result = CliRunner().invoke(build_app(), ["shrink", str(folder), "--bits", str(bits)])
    assert result.exit_code == 0, result.output
    after = SpecAdapter.from_pretrained(folder)
    assert (folder / WEIGHTS_NAME).stat().st_size < size * (0.75 if bits == 8 else 0.6)
    assert (after.bits, after.options) == (bits, before.options)
    assert (folder / "README.md").read_text() == "A card."


def test_bits_that_there_are_not(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    before = (folder / WEIGHTS_NAME).read_bytes()
    result = CliRunner().invoke(build_app(), ["shrink", str(folder), "--bits", "3"])
    assert result.exit_code != 0
    assert (folder / WEIGHTS_NAME).read_bytes() == before
