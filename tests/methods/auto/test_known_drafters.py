"""The table of published drafters, and the page generated from it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

import hf_spec
from hf_spec.common.errors import OptionError
from hf_spec.methods.auto import known_drafters as module
from hf_spec.methods.auto.known_drafters import heads_for, known_drafters
from tests.tiny_models import build

PAGE = Path(__file__).parents[3] / "docs" / "published-heads.md"


@pytest.fixture(autouse=True)
def every_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {drafter.strategy for drafter in known_drafters()}
    monkeypatch.setattr(module, "known_strategies", lambda: sorted(names))


def test_the_table() -> None:
    repos = [drafter.repo for drafter in known_drafters()]
    assert len(set(repos)) == len(repos)
    for drafter in known_drafters():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", drafter.repo)
        assert drafter.targets
        assert all("/" not in target for target in drafter.targets)
        assert drafter.licence
        assert drafter.family


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "qwen3-8b",
        "/models/Qwen3-8B/",
        "Qwen/Qwen3-8B-AWQ",
        "unsloth/Qwen3-8B-bnb-4bit",
        "nvidia/Qwen3-8B-FP8-dynamic",
    ],
)
def test_names(name: str) -> None:
    repos = {drafter.repo for drafter in heads_for(name)}
    assert {"RedHatAI/Qwen3-8B-speculator.eagle3", "amd/PARD-Qwen3-0.6B"} <= repos
    assert "AngelSlim/Qwen3-4B_eagle3" not in repos


def test_metas_own_names() -> None:
    found = heads_for("meta-llama/Meta-Llama-3-8B-Instruct")
    assert "yuhuili/EAGLE-LLaMA3-Instruct-8B" in {drafter.repo for drafter in found}


def test_a_model_is_asked_for_by_its_name() -> None:
    model = copy.deepcopy(build("llama"))
    assert hf_spec.heads_for(model) == []
    model.config.name_or_path = "openai/gpt-oss-20b"
    assert {one.strategy for one in hf_spec.heads_for(model)} == {"eagle", "block"}


def test_something_else_has_no_name() -> None:
    with pytest.raises(OptionError, match="model of type int: pass a model or its Hub id"):
        heads_for(5)  # type: ignore[arg-type]


def test_drafters_that_nothing_serves_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "known_strategies", lambda: ["block"])
    assert {one.strategy for one in heads_for("Qwen/Qwen3-8B")} == {"block"}


def test_the_page_has_every_target() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M))
    wanted: dict[str, list[str]] = {}
    for drafter in known_drafters():
        for target in drafter.targets:
            wanted.setdefault(target, []).append(drafter.repo)
    assert {target for target in rows if target in wanted} == set(wanted)
    for target, repos in wanted.items():
        assert re.findall(r"`([^`]+/[^`]+)`", rows[target]) == repos
