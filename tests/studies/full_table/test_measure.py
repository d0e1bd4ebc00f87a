"""The command of docs/benchmarks.md: the strategies of each model, and the written files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.studies.full_table import measure as full
from examples.studies.full_table.measure import MODELS, main
from hf_spec.methods.registry import known_strategies

ADAPTERS = Path(__file__).parents[3] / "examples" / "adapters"


def strategies(name: str, adapters: Path) -> dict[str, Any]:
    return {config.strategy: given for _, config, given in MODELS[name].entries(adapters)}


def test_every_strategy_that_has_an_adapter_is_measured(tmp_path: Path) -> None:
    for method in ("draft", "disco", "falcon", "sdsat"):
        (tmp_path / f"smollm2-135m-{method}").mkdir()
    found = strategies("smollm2", tmp_path)
    # No head is published for the small models that every machine can run.
    published = {"block", "eagle", "gemma_assistant", "heads", "mtp", "pard"}
    assert set(known_strategies()) - set(found) == published
    draft, falcon = (str(tmp_path / f"smollm2-135m-{method}") for method in ("draft", "falcon"))
    assert found["tree"] == found["gsd"] == found["draft"] == draft
    assert found["auto"] == [falcon, draft]
    assert found["lookup"] is None


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    assert strategies("gemma3", tmp_path) == {
        "none": None,
        "lookup": None,
        "draft": "truncated:4",
        "tree": "truncated:4",
        "gsd": "truncated:4",
        "auto": None,
    }


def test_the_adapters_of_this_checkout_are_found() -> None:
    assert {"draft", "disco", "falcon"} <= strategies("smollm2", ADAPTERS).keys()
    gemma3 = strategies("gemma3", ADAPTERS)
    assert {"draft", "tree", "gsd", "disco", "sdsat", "auto"} <= gemma3.keys()
    assert gemma3["draft"] == str(ADAPTERS / "gemma-3-270m-draft")
    assert gemma3["auto"] == gemma3["draft"]


@pytest.mark.full
def test_every_file_is_written(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(
        MODELS["gemma3"],
        folder=lambda: folder,
        draft="truncated:2",
        drafts=("tree:max_draft_tokens=2",),
        adapters={},
    )
    monkeypatch.setitem(full.MODELS, "gemma3", tiny)
    out = tmp_path / "out"
    options = ["--new-tokens", "3", "--repeats", "1", "--per-task", "1", "--no-compiled"]
    main(["--model", "gemma3", "--batch", "1", "2", "--out", str(out), *options])
    report = json.loads((out / "gemma3.json").read_text())
    assert report["model"] == "Gemma-3-270M"
    assert report["command"].startswith(
        "python -m examples.studies.full_table.measure --model gemma3"
    )
    assert {row["batch_size"] for row in report["summary"]} == {1, 2}
    assert all(record["identical"] for record in report["records"])
    assert len(list((out / "gemma3_plots").glob("*.png"))) == 4
    printed = capsys.readouterr().out
    assert printed.startswith("## Gemma-3-270M")
    assert "### batch size 2" in printed
