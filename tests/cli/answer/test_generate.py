"""`hf-spec generate`: sources of the prompt, and the same text as plain `generate()`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.cli.answer.conftest import PROMPT, make_tokenizer
from tests.common.test_hub import hub, nobody  # noqa: F401 - the fixtures
from tests.tiny_models import build


def run(*arguments: Any, stdin: str = "") -> Any:
    return CliRunner().invoke(build_app(), ["generate", *map(str, arguments)], input=stdin)


def plain(ids: Any, new_tokens: int) -> str:
    output = build("llama").generate(ids, max_new_tokens=new_tokens, do_sample=False)
    return make_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture
def continued() -> str:
    return plain(make_tokenizer()(PROMPT, return_tensors="pt")["input_ids"], 24)


RAW = ("--raw", "--max-new-tokens", 24, "--strategy", "lookup")


@pytest.mark.smoke
def test_the_prompt_from_everywhere(folder: Path, continued: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    for result in (
        run(folder, PROMPT, *RAW),
        run(folder, "-", *RAW, stdin=PROMPT),
        run(folder, "--prompt-file", file, *RAW),
    ):
        assert result.exit_code == 0, result.output
        assert result.stdout == continued + "\n"


def test_the_chat_template_by_default(folder: Path) -> None:
    ids = make_tokenizer()(f"user {PROMPT} answer", return_tensors="pt")["input_ids"]
    result = run(folder, PROMPT, "--max-new-tokens", 12, "--strategy", "none")
    assert result.stdout == plain(ids, 12) + "\n"


def test_auto_is_the_default(folder: Path, continued: str) -> None:
    result = run(folder, PROMPT, "--raw", "--max-new-tokens", 24, "--json")
    assert json.loads(result.stdout)["strategy"] == "auto"
    assert json.loads(result.stdout)["text"] == continued


def test_statistics_stand_beside_the_text(folder: Path, continued: str) -> None:
    result = run(folder, PROMPT, *RAW, "--stats")
    assert result.stdout == continued + "\n"
    assert "lookup:\nnew tokens  " in result.stderr


def test_json(folder: Path, continued: str) -> None:
    draft = ("--strategy", f"draft:max_draft_tokens=5@{folder}")
    result = run(folder, PROMPT, "--raw", "--max-new-tokens", 24, *draft, "--json")
    found = json.loads(result.stdout)
    assert found["text"] == continued
    assert make_tokenizer().decode(found["token_ids"]) == continued
    assert found["prompt_tokens"] == 12
    # The draft model is the target, so five of every six tokens are accepted drafts.
    assert found["stats"]["accepted_tokens"] == sum(found["stats"]["accepted_by_position"]) == 20
    assert found["stats"]["new_tokens"] == 24


def test_sampling(folder: Path, continued: str) -> None:
    sample = ("--do-sample", "--temperature", 3.0, "--top-p", 0.9, "--seed", 5)
    first, second = (run(folder, PROMPT, *RAW, *sample).stdout for _ in range(2))
    assert first == second != continued + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass either a prompt"),
        (("text", "--prompt-file", __file__), "pass either a prompt"),
        (("",), "the prompt is empty"),
        (("text", "--seed", 1), "add --do-sample"),
        (("text", "--batch-size", 2), "--batch-size needs --prompts"),
        (("text", "--strategy", "nonsense"), "unknown spec_strategy 'nonsense'"),
        (("text", "--dtype", "int8"), "'int8' is not one of 'auto', 'float32'"),
        (("text", "--device", "abacus"), "--device abacus"),
        (("text", "--max-new-tokens", 0), "--max-new-tokens"),
        (("w11 " * 300, "--raw"), "the prompt has 300 tokens"),
    ],
)
def test_wrong_usage(folder: Path, arguments: tuple[Any, ...], message: str) -> None:
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "lookup", "--assistant", "x"), "none of the named strategies uses"),
        (("--strategy", "lookup@x"), "takes no assistant"),
        (("--strategy", "draft@/nowhere/at/all"), "there is no folder /nowhere/at/all"),
        (("--strategy", "falcon@/nowhere/at/all"), "there is no folder /nowhere/at/all"),
        (("--strategy", "falcon"), "needs --assistant"),
    ],
)
def test_assistants_that_cannot_be(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(folder, PROMPT, *arguments, "--max-new-tokens", 2)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_names_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    for wrong in ("lokup", "lookup:copy_lenght=3"):
        result = run(tmp_path, "text", "--strategy", wrong)
        assert result.exit_code == 2
        assert "cannot be loaded" not in result.stderr
    assert "cannot be loaded" in run(tmp_path, "text").stderr


@pytest.mark.usefixtures("nobody")
def test_a_hub_that_cannot_be_reached() -> None:
    result = run("org/model", "text")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: org/model is neither a folder nor in the cache, and")
    assert result.stderr.count("\n") == 1
