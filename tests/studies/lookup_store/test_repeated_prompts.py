"""Study of repeated prompts: the records and the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.studies.lookup_store import repeated_prompts
from hf_spec.common.prompts import Prompt
from tests.other_tokenizers import bpe, learned


@pytest.mark.full
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: learned("bpe"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: bpe())
    ids = bpe()("the quick brown", return_tensors="pt").input_ids
    monkeypatch.setattr(Prompt, "encode", lambda *_: ids)
    out = tmp_path / "records.json"
    sizes = ["--num-prompts", "2", "--epochs", "2", "--new-tokens", "6"]
    repeated_prompts.main(["--model", "x", *sizes, "--out", str(out)])
    assert "| epoch | lookup" in " ".join(capsys.readouterr().out.split())
    record = json.loads(out.read_text())
    assert len(record["records"]) == 2 * 2 * 3
    # While the store is empty, all variants are equal.
    first = record["records"][:3]
    assert len({(one["row_forwards"], one["accepted"]) for one in first}) == 1
    assert "model" not in record["settings"]


def test_tau_is_that_of_all_prompts() -> None:
    part = {"epoch": 0, "variant": repeated_prompts.ALONE, "drafted": 10}
    records = [
        {**part, "row_forwards": 1, "accepted": 3},
        {**part, "row_forwards": 3, "accepted": 1},
    ]
    rows = repeated_prompts.summary(records)
    assert (rows[0]["tau"], rows[0]["acceptance_rate"]) == (1.0, 0.2)
