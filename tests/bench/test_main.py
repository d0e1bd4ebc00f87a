"""`python -m hf_spec.bench` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hf_spec.bench import contenders
from hf_spec.bench.__main__ import main
from hf_spec.bench.contenders import Contender, Run


def test_the_table_is_printed_and_every_record_written(
    folder: Path, prompt_file: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", str(folder), "--prompts", str(prompt_file), "--out", str(out)]
    main([*arguments, "--new-tokens", "6", "--repeats", "2"])
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    names = list(dict.fromkeys(record["contender"] for record in written["records"]))
    assert names[0] == "plain"
    assert {"transformers lookup", "hf_spec lookup, one match", "hf_spec lookup"} <= set(names)
    assert len(written["records"]) == len(names) * 2 * 2
    assert all(record["identical"] for record in written["records"])
    assert all(f"| {name} | " in printed for name in names)
    assert written["command"].startswith(f"python -m hf_spec.bench --model {folder}")
    assert {row["task"] for row in written["summary"]} == {"all", "count", "letters"}
    assert written["environment"]["threads"] >= 1


def test_strategies_of_ones_own(
    folder: Path, prompt_file: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", str(folder), "--prompts", str(prompt_file), "--out", str(out)]
    chain, graph = f"draft:max_draft_tokens=2@{folder}", f"gsd@{folder}"
    options = ["--strategy", chain, "--strategy", graph, "--oracle", str(folder)]
    main([*arguments, *options, "--new-tokens", "6", "--repeats", "1"])
    records = json.loads(out.read_text())["records"]
    assert [record["contender"] for record in records[:4]] == ["plain", chain, graph, "oracle"]
    assert all(record["identical"] for record in records)
    assert len(records[1]["stats"]["accepted_by_position"]) == 2
    assert records[2]["stats"]["counters"]["rounds"] > 0
    assert "| rounds with a merged token accepted |" in capsys.readouterr().out


def test_an_interrupted_run_leaves_what_it_has(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "three.jsonl"
    texts = {"first": "a b c d", "second": "a b c", "third": "a b"}
    rows = [{"id": name, "task": name, "turns": [text]} for name, text in texts.items()]
    prompts.write_text("\n".join(map(json.dumps, rows)))

    def breaking(*arguments: Any) -> Contender:
        def run(ids: Tensor, new_tokens: int) -> Run:
            if ids.shape[1] == 2:
                raise KeyboardInterrupt
            return Run(ids[0])

        return Contender("breaking", run)

    monkeypatch.setattr(contenders, "strategy", breaking)
    out = tmp_path / "result.json"
    arguments = ["--model", str(folder), "--prompts", str(prompts), "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--strategy", "lookup", "--new-tokens", "3", "--repeats", "2"])
    written = json.loads(out.read_text())
    kept = [(record["prompt"], record["contender"]) for record in written["records"]]
    both = ["plain", "breaking", "breaking", "plain"]
    assert kept == [(prompt, name) for prompt in ("first", "second") for name in both]
    assert {row["task"] for row in written["summary"]} == {"all", "first", "second"}
    assert not list(tmp_path.glob("*.part"))


def test_the_model_must_be_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--model" in capsys.readouterr().err
