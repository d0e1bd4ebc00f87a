"""Perplexity with an adapter: bit-identical to the target's, or that of another model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.sdsat.perplexity import losses, main, with_adapter
from hf_spec.adapters.folder import save_adapter
from hf_spec.methods.sdsat.adaptive_tokens import AdaptiveTokens
from hf_spec.training.responses import read_responses
from tests.cli.train.cli_files import save_model, save_responses
from tests.tiny_models import build, random_adaptive_tokens


def test_losses_are_those_of_the_answers(tmp_path: Path) -> None:
    texts = list(read_responses(save_responses(tmp_path / "answers.jsonl")))
    found = losses(build("llama"), texts)
    assert len(found) == sum(len(text.response) for text in texts)
    prompt, answer = texts[0].prompt, texts[0].response
    logits = build("llama")(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    expected = [-logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]
    assert found[: len(answer)].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", ["gated", "embeddings"])
@pytest.mark.parametrize("mistake", ["adapts a row of the text", "replaces a row of the text"])
def test_what_reaches_the_text_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, mistake: str
) -> None:
    texts = list(read_responses(save_responses(tmp_path / "answers.jsonl")))
    save_adapter(tmp_path / mode, random_adaptive_tokens(build("llama"), mode))
    untouched = losses(build("llama"), texts)
    assert torch.equal(with_adapter(build("llama"), tmp_path / mode, texts), untouched)
    replaced = "acting" if mistake.startswith("adapts") else "embed"
    right = getattr(AdaptiveTokens, replaced)

    def wrong(self: AdaptiveTokens, *args: Any) -> Any:
        # A row of the text is treated as an adaptive token.
        ids = args[-1].clone()
        ids[:, 1] = -1
        return right(self, *args[:-1], ids)

    monkeypatch.setattr(AdaptiveTokens, replaced, wrong)
    seen = not torch.equal(with_adapter(build("llama"), tmp_path / mode, texts), untouched)
    # Without a LoRA, nothing changes the layers.
    assert seen == (mode == "gated" or replaced == "embed")


def test_command_tells_who_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_model(tmp_path / "base")
    answers = save_responses(tmp_path / "answers.jsonl")
    for mode in ("gated", "embeddings", "lora"):
        save_adapter(tmp_path / mode, random_adaptive_tokens(build("llama"), mode))
    tuned = tmp_path / "tuned"
    build("llama", seed=7).save_pretrained(tuned)
    adapters = [f"--adapter={tmp_path / mode}" for mode in ("gated", "embeddings", "lora")]
    main([f"--model={base}", *adapters, f"--tuned={tuned}", f"--texts={answers}"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["equal_to_the_bit"] for row in rows] == [True, True, True, False, False]
    assert rows[1]["perplexity"] == rows[0]["perplexity"] != rows[3]["perplexity"]
    assert all(row["tokens"] == rows[0]["tokens"] for row in rows)
    assert math.isfinite(rows[4]["perplexity"])
