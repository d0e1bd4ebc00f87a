"""Study of draft heads over few tokens: alternating order, equal drafts, and the table."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.disco import few_tokens
from hf_spec.methods.feature_pairs.draft_head import DraftHead
from tests.tiny_models import VOCAB, build, draft_model, repetitive_prompt


def trained() -> Any:
    draft = copy.deepcopy(draft_model("llama"))
    known = torch.arange(0, VOCAB, 2)
    draft.set_output_embeddings(DraftHead(draft.get_output_embeddings(), known))
    return draft


def test_greedy_drafts_are_the_same_and_the_head_is_given_back() -> None:
    draft, texts = trained(), [repetitive_prompt(9), repetitive_prompt(14)]
    head = draft.get_output_embeddings()
    ways = few_tokens.ways(None)
    found = few_tokens.measure(build("llama"), draft, texts, ways, 6)
    records = [record for of_text in found for record in of_text]
    assert draft.get_output_embeddings() is head
    assert [r["head"] for r in records if r["text"] == 0][:2] == ["all", "few"]
    assert [r["head"] for r in records if r["text"] == 1][:2] == ["few", "all"]
    rows = {row["way"]: row for row in few_tokens.summary(records)}
    assert set(rows) == set(ways)
    for name in ("draft", "tree", "gsd"):
        assert rows[name]["same"] == rows[name]["texts"] == 2
    assert len(few_tokens.table(list(rows.values())).splitlines()) == 2 + len(ways)


def test_what_is_saved_by_hand() -> None:
    base = {"way": "draft", "draft_forwards": 10, "drafted": 9, "tokens": [1]}
    records = [
        {**base, "head": "few", "draft_seconds": 0.03},
        {**base, "head": "all", "draft_seconds": 0.04, "tokens": [2]},
    ]
    (row,) = few_tokens.summary(records)
    assert row["few_ms"] == pytest.approx(3)
    assert row["all_ms"] == pytest.approx(4)
    assert row["saved"] == pytest.approx(0.25)
    assert row["same"] == 0


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model = build("llama")
    monkeypatch.setattr(few_tokens, "begin", lambda options: (model, None))
    monkeypatch.setattr(few_tokens, "resolve_draft_model", lambda *given: trained())
    monkeypatch.setattr(few_tokens.AutoTokenizer, "from_pretrained", lambda name: None)

    class Text:
        def encode(self, tokenizer: Any) -> torch.Tensor:
            return repetitive_prompt(9)

    monkeypatch.setattr(few_tokens, "load_prompts", lambda per_task: [Text()])
    out = tmp_path / "out.json"
    few_tokens.main(["--model", "m", "--assistant", "d", "--new-tokens", "4", "--out", str(out)])
    assert "| draft, sampled |" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["records"]) == 10
