"""The `hf-spec` entry point without its optional packages."""

from __future__ import annotations

import importlib.util

import pytest

from hf_spec.cli import main
from hf_spec.common.installing import how_to_install


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert "rich and typer and yaml" in str(stopped.value)
    assert how_to_install("cli") in str(stopped.value)
