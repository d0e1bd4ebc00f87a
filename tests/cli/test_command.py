"""Help of every command at two widths, and suggestions for option names of other tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import COMMANDS, build_app
from hf_spec.cli.config_file import OTHER_NAMES, suggestions
from tests.cli.test_app import LEAVES

PAGES = sorted({"", *COMMANDS, *LEAVES})


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    def page(name: str, columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        result = CliRunner().invoke(build_app(), [*name.split(), "--help"])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    return page


@pytest.mark.parametrize("name", PAGES)
def test_a_help_fits_80_columns_and_is_complete_at_40(name: str, page: Any) -> None:
    lines = page(name, 80)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    lines = page(name, 40)
    assert max(map(len, lines)) <= 40
    if name in LEAVES:
        # Long words are split across lines.
        text = re.sub(r"[│─╭╮╰╯\s]", "", "\n".join(lines))
        for parameter in LEAVES[name].params:
            is_option = parameter.param_type_name == "option"
            shown = parameter.opts[-1] if is_option else parameter.name.upper()
            negated = f"--[no-]{shown.removeprefix('--')}"
            assert shown in text or negated in text
            assert re.sub(r"[\s`]", "", parameter.help) in text


def test_settings_have_panels_of_their_own(page: Any) -> None:
    titles = [re.findall("╭─ (.*?) ─", line) for line in page("train falcon", 80)]
    expected = ["Model and data", "Head", "Loss", "Training", "General"]
    assert [title for found in titles for title in found] == expected


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("train falcon --model m", "options: MODEL)"),
        ("train draft m --layers 2", "--num-layers"),
        ("train falcon m --vocabulary 9", "--vocab-size"),
        ("train falcon m --epochs 2", "--num-train-epochs"),
        ("train falcon m --warm-up 0", "--warmup-ratio"),
        ("bench m --batch 8", "--batch-size"),
        ("bench m --new-tokens 8", "--max-new-tokens"),
        ("bench m --no-basline", "--no-baselines"),
        ("bench m --sample", "--do-sample"),
        ("verify m --new-tokens 8", "--max-new-tokens"),
        ("serve m --max-batch 8", "--max-num-seqs"),
        ("generate m --max-token 8", "--max-new-tokens"),
    ],
)
def test_an_unknown_option_suggests_the_right_one(
    words: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(build_app(), words.split())
    assert result.exit_code == 2
    assert right in result.output


@pytest.mark.parametrize(
    ("key", "right"),
    [("epochs", "num-train-epochs"), ("vocabulary", "vocab-size"), ("modl", "model")],
)
def test_so_does_an_unknown_key_of_a_file(
    key: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "falcon.yaml"
    file.write_text(f"{key}: 3")
    result = CliRunner().invoke(build_app(), ["train", "falcon", "--config", str(file)])
    assert result.exit_code == 2
    assert f"did you mean {right}?" in result.output


def test_no_suggestion_if_nothing_is_near() -> None:
    assert suggestions("xyzzy", LEAVES["bench"]) == []
    # Suggestions are limited to options of the command.
    assert OTHER_NAMES["max-batch"] not in suggestions("max-batch", LEAVES["bench"])


def test_other_names_lead_to_options_that_exist() -> None:
    options = {option for leaf in LEAVES.values() for p in leaf.params for option in p.opts}
    assert {f"--{name}" for name in OTHER_NAMES.values()} <= options
    assert not options & {f"--{name}" for name in OTHER_NAMES}
