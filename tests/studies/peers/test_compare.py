"""Comparison with peer processes: both are timed, and ties are distinguished from bugs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.studies.full_table.by_prompt import WARM_UP
from examples.studies.peers.compare import main
from hf_spec.common.prompts import load_prompts
from hf_spec.evaluation.bench.contenders import plain

# Prints responses from a file, with another last token if argument 2 is 1; each takes 1000 s.
PEER = """
import json, sys
answers, other = json.load(open(sys.argv[1])), int(sys.argv[2])
print(json.dumps({"other": other}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    *ids, last = answers[json.dumps(asked)]
    ids.append(last ^ other)
    print(json.dumps({"ids": ids, "processor_seconds": 1000.0}), flush=True)
"""


@pytest.fixture
def command(folder: Path, tmp_path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = plain(AutoModelForCausalLM.from_pretrained(folder))
    answers = {}
    for prompt in load_prompts(per_task=1):
        ids = prompt.encode(tokenizer)
        for count in (4, WARM_UP):
            asked = json.dumps({"ids": ids[0].tolist(), "new_tokens": count})
            answers[asked] = reference.run(ids, count).sequence.tolist()
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    (tmp_path / "peer.py").write_text(PEER)
    return shlex.join([sys.executable, str(tmp_path / "peer.py"), str(tmp_path / "answers.json")])


def test_command(folder: Path, tmp_path: Path, command: str, capsys: Any) -> None:
    out = tmp_path / "record.json"
    size = ["--per-task", "1", "--new-tokens", "4", "--repeats", "2"]
    peers = ["--peer", f"right={command} 0", "--peer", f"wrong={command} 1"]
    given = ["--model", str(folder), "--strategy", "lookup", "--out", str(out), *size, *peers]
    main([*given, "--processor-time"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    counts = {row[0].strip("| "): row[-1].strip("| ") for row in rows}
    assert counts["lookup"] == counts["right"] == "6/6"
    assert counts["wrong"] == "0/6"
    written = json.loads(out.read_text())
    assert written["peers"] == {"right": {"other": 0}, "wrong": {"other": 1}}
    for record in written["records"]:
        theirs = record["contender"] in written["peers"]
        # Peers report their own processor time, here without having used it.
        assert all((seconds >= 1000) == theirs for seconds in record["seconds"])
        assert max(record["elapsed"]) < 100
        kinds = [difference["kind"] for difference in record["differences"]]
        assert kinds == (["bug"] if record["contender"] == "wrong" else [])


@pytest.mark.full
def test_outputs_of_other_weights_are_not_examined(
    folder: Path, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "record.json"
    size = ["--per-task", "1", "--new-tokens", "4", "--repeats", "1", "--other-weights"]
    peer = ["--peer", f"wrong={command} 1", "--out", str(out)]
    main(["--model", str(folder), "--strategy", "lookup", *size, *peer])
    assert not any(record["differences"] for record in json.loads(out.read_text())["records"])
