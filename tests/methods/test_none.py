"""The engine without drafting: one token per forward pass, output equal to plain `generate()`."""

from __future__ import annotations

import pytest
import torch

from hf_spec import AssistantError, NoneConfig
from tests.tiny_models import build, ragged_batch


def test_it_sends_nothing_and_changes_nothing() -> None:
    model, batch = build("llama"), ragged_batch()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 5, "pad_token_id": 0}
    output = model.generate(**batch, **options, spec_strategy="none", return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**batch, **options))
    assert output.spec_stats.drafted_tokens == 0
    longest = output.sequences.shape[1] - batch["input_ids"].shape[1]
    assert output.spec_stats.target_forwards == longest


def test_it_wants_no_assistant() -> None:
    model = build("llama")
    with pytest.raises(AssistantError, match="leave out assistant="):
        model.generate(**ragged_batch(), spec_strategy=NoneConfig(), assistant=model)
