"""One default for the dtype and the device, whatever command loads a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_spec import OptionError
from hf_spec.cli.options import AUTO, check_out
from tests.cli.test_app import LEAVES


@pytest.mark.parametrize("name", [name for name in LEAVES if "card" not in name])
def test_every_command_with_a_model_has_both_options(name: str) -> None:
    parameters = {one.name: one for one in LEAVES[name].params}
    if "model" not in parameters:
        assert name in {"push", "demo"}
        return
    assert parameters["dtype"].default == AUTO
    assert parameters["device"].default is None
    assert "on a CPU float32" in parameters["dtype"].help


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    check_out(None)
    check_out(tmp_path / "results.json")
    with pytest.raises(OptionError, match="there is no folder /no/such"):
        check_out(Path("/no/such/results.json"))
    with pytest.raises(OptionError, match="that is a folder"):
        check_out(tmp_path)
