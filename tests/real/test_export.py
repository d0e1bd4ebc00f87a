"""The EAGLE-3 head of examples/adapters, exported: in both layouts it drafts what it drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import EagleConfig
from hf_spec.common.prompts import load_prompts
from hf_spec.evaluation.trace.rounds import record_rounds
from hf_spec.methods.exporting import export_head
from tests.identity import assert_identical

pytestmark = [pytest.mark.real, pytest.mark.full]

HEAD = Path(__file__).parents[2] / "examples" / "adapters" / "smollm2-135m-eagle3"
[PROMPT] = load_prompts(per_task=1, tasks=["code"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_shipped_head(engine: str, smollm2: Any, tmp_path: Path) -> None:
    model, tokenizer = smollm2
    export_head(HEAD, tmp_path / "out", engine, model.config.name_or_path)
    prompt = PROMPT.encode(tokenizer)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    config = EagleConfig(tree="chain", max_draft_tokens=4)
    given = {"max_new_tokens": 12, "do_sample": False}

    def drafts(folder: Path) -> tuple[Any, list[list[int]], int]:
        sequences, rounds = record_rounds(model, inputs, config, str(folder), **given)
        verdicts = [one.verdict for one in rounds]
        kept = sum(len(verdict.accepted[0]) for verdict in verdicts)
        return sequences, [list(verdict.tree.tokens) for verdict in verdicts], kept

    (sequences, expected, kept), (again, found, also) = drafts(HEAD), drafts(tmp_path / "out")
    assert found == expected
    assert kept == also > 0
    assert torch.equal(sequences, again)
    call = {**inputs, **given, "spec_strategy": config, "assistant": HEAD}
    plain = model.generate(**inputs, **given)
    assert_identical(model, call, sequences, plain, tokenizer=tokenizer)
