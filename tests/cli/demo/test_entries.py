"""What is compared, in a checkout and outside of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_spec.cli.demo import entries
from hf_spec.cli.demo.entries import HEAD, chosen_entries, default_entries, find_head
from hf_spec.errors import SpecError
from tests import tiny_models

ROOT = Path(__file__).parents[3]


def names(found: list[Any]) -> list[str]:
    return [name for name, _, _ in found]


def test_the_head_is_found_in_a_checkout_alone(tmp_path: Path) -> None:
    assert find_head([tmp_path, ROOT]) == ROOT / HEAD
    assert find_head([tmp_path]) is None


def test_the_folder_of_the_command_may_be_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "CHECKOUT", Path("/nowhere"))
    monkeypatch.chdir(ROOT)
    assert find_head() == ROOT / HEAD
    monkeypatch.chdir("/")
    assert find_head() is None


def test_without_the_head_the_reader_is_told() -> None:
    found, missing = default_entries(tiny_models.build("llama"), None)
    assert names(found) == ["none", "lookup", "auto"]
    assert str(HEAD) in missing
    assert "--strategy falcon@FOLDER" in missing


def test_a_head_of_another_model_is_left_out_and_named() -> None:
    found, missing = default_entries(tiny_models.build("llama"), ROOT / HEAD)
    assert names(found) == ["none", "lookup", "auto"]
    assert "hidden_size" in missing


@pytest.mark.real
def test_the_head_serves_falcon_and_auto(smollm2: tuple[Any, Any]) -> None:
    found, missing = default_entries(smollm2[0], ROOT / HEAD)
    assert missing == ""
    assert names(found) == ["none", "lookup", "falcon", "auto"]
    assert [assistant for *_, assistant in found] == [None, None, *[str(ROOT / HEAD)] * 2]


def test_the_engine_alone_is_always_a_baseline() -> None:
    assert names(chosen_entries(["lookup"], [])) == ["none", "lookup"]
    assert names(chosen_entries(["lookup", "none"], [])) == ["lookup", "none"]


def test_options_and_assistants_are_those_of_bench() -> None:
    [_, (name, config, assistant)] = chosen_entries(["lookup:copy_length=5"], ["DRAFT"])
    assert (name, config.copy_length, assistant) == ("lookup:copy_length=5", 5, None)
    [_, tree] = chosen_entries(["tree"], ["DRAFT"])
    assert tree[2] == "DRAFT"


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(SpecError, match="lokup"):
        chosen_entries(["lokup"], [])
