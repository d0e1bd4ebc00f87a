"""Identity comparison: whether outputs are equal, and where they first differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from examples.studies.lossless.identity import compare, main
from hf_spec import LookupConfig
from hf_spec.common.prompts import Prompt
from hf_spec.evaluation.bench.contenders import Contender, Run, plain, strategy

NEW_TOKENS = 8


def altered(reference: Contender, change: Any) -> Contender:
    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        return Run(change(reference.run(ids, new_tokens).sequence.clone())[None])

    return Contender("altered", run)


def other_token(position: int) -> Any:
    def change(sequence: Tensor) -> Tensor:
        sequence[position] = (sequence[position] + 1) % 97
        return sequence

    return change


def test_identical(model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
    rows = compare(plain(model), [strategy(model, LookupConfig())], prompts, tokenizer, NEW_TOKENS)
    assert [(row["prompt"], row["task"], row["contender"]) for row in rows] == [
        ("count-1", "count", "lookup"),
        ("letters-1", "letters", "lookup"),
    ]
    for row in rows:
        assert row["identical"]
        assert row["first_difference"] is None
        assert row["new_tokens"] == NEW_TOKENS
        assert row["tau"] >= 0


@pytest.mark.parametrize(
    ("change", "position"),
    [
        (other_token(9), 9),
        (other_token(-1), 7 + NEW_TOKENS - 1),
        (lambda sequence: sequence[:-2], 7 + NEW_TOKENS - 2),
    ],
)
def test_a_planted_difference_is_found(
    model: Any, prompts: list[Prompt], tokenizer: Any, change: Any, position: int
) -> None:
    reference = plain(model)
    contenders = [altered(reference, change), reference]
    found, same = compare(reference, contenders, prompts[:1], tokenizer, NEW_TOKENS)
    assert (found["identical"], found["first_difference"]) == (False, position)
    assert found["tau"] is None
    assert (same["identical"], same["first_difference"]) == (True, None)


def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "identity.json"
    arguments = ["--model", str(folder), "--new-tokens", "4", "--per-task", "1"]
    status = main([*arguments, "--draft-layers", "2", "--out", str(out)])
    assert status == 0
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines()] == [
        "lookup",
        "draft",
        "tree",
        "gsd",
    ]
    assert printed.count("6 of 6 identical, mean tau ") == 4
    written = json.loads(out.read_text())
    assert len(written["rows"]) == 24
    assert written["dtype"] == "float32"
    assert written["new_tokens"] == 4


def test_strategies_of_ones_own(folder: Path, capsys: Any) -> None:
    arguments = ["--model", str(folder), "--new-tokens", "4", "--per-task", "1"]
    assert main([*arguments, "--strategy", f"gsd:merge_length=0@{folder}"]) == 0
    assert capsys.readouterr().out.startswith(f"gsd:merge_length=0@{folder}: 6 of 6 identical")
