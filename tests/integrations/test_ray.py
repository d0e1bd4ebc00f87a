"""Ray Data: the example maps a predictor over a data set with a local `ray`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.answer.conftest import PROMPT, make_tokenizer
from tests.installed import ROOT
from tests.tiny_models import build

pytest.importorskip("ray", reason="needs the extra 'ray'")
pytestmark = pytest.mark.integration

NEW_TOKENS = 16


def test_the_example(tmp_path: Path) -> None:
    model, source = tmp_path / "model", tmp_path / "in.jsonl"
    build("llama").save_pretrained(model)
    tokenizer: Any = make_tokenizer()
    tokenizer.save_pretrained(model)
    words = PROMPT.split()
    prompts = [" ".join(words[n % 3 : n % 3 + 4 + n]) for n in range(7)]
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in prompts))
    given = ["--model", model, "--prompts", source, "--out", tmp_path / "out"]
    given += ["--max-new-tokens", NEW_TOKENS, "--batch-size", 3]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray_data.py"), *map(str, given)],
        check=False,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        json.loads(line)
        for file in (tmp_path / "out").glob("*.json*")
        for line in file.read_text().splitlines()
    ]
    found = {line["prompt"]: line["answer"] for line in lines}
    assert len(lines) == len(found) == len(prompts)
    for text in prompts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        said = build("llama").generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        expected = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
        assert found[text] == expected
