"""Greedy head study: every generation with all logits or the best logits is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.studies.kernels.greedy_head import main, table
from tests import tiny_models
from tests.compiler import needs_compiler


def test_table() -> None:
    seconds = {"all logits": [0.03, 0.02], "best logits": [0.01, 0.016]}
    assert table({"none": {"seconds": seconds, "most_rows": 4}}).splitlines() == [
        "| strategy | all logits | best logits | ratio | up to rows |",
        "|---|---|---|---|---|",
        "| none | 20.0 / 25.0 | 10.0 / 13.0 | 2.12 | 4 |",
    ]


@needs_compiler
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    tiny_models.tokenizer().save_pretrained(folder)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "head.json"
    lines = ({"id": text, "task": "code", "turns": [text]} for text in ("a bc", "b a b c"))
    prompts.write_text("\n".join(map(json.dumps, lines)))
    files = ["--prompts", str(prompts), "--out", str(out)]
    main(["--model", str(folder), *files, "--max-new-tokens", "4", "--repeats", "2"])
    assert "| lookup | " in capsys.readouterr().out
    found = json.loads(out.read_text())["strategies"]
    assert list(found) == ["none", "lookup"]
    for entry in found.values():
        assert [len(runs) for runs in entry["seconds"].values()] == [4, 4]
