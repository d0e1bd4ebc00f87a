"""Scores of finished rows match plain `generate()`, which keeps running them on padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

from hf_spec.common.compat import output_cache
from tests import criteria, tiny_models

NEW_TOKENS = 20


def given(name: str) -> dict[str, Any]:
    """Return a call whose rows end early and late, padded with a token that is also generated."""
    batch = tiny_models.prompts(name, "ragged")
    free = tiny_models.build(name).generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    said = free[:, batch["input_ids"].shape[1] :]
    return {
        **batch,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": [int(said[0, 3]), int(said[3, 9])],
        "pad_token_id": int(said[4, 2]),
        "return_dict_in_generate": True,
        "output_scores": True,
    }


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        (name, strategy)
        for name in ("llama", "bloom", "gemma3")
        for strategy in ("lookup", "gsd", "sdsat")
    ],
)
def test_criteria_see_the_scores_of_plain_decoding(name: str, strategy: str) -> None:
    model, call = tiny_models.build(name), given(name)
    rule = criteria.Recording()
    output, expected = criteria.compare(
        model, call, [rule], tiny_models.speculation(name, strategy)
    )
    new = [row.new_tokens for row in output.spec_stats.rows]
    assert min(new) < max(new) == len(expected.scores)


class Counting(RepetitionPenaltyLogitsProcessor):
    """Stateful processor; a user-defined class is called once for each token of a row."""

    def __init__(self) -> None:
        super().__init__(1.2)
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + torch.arange(scores.shape[1]) * 0.01 * (self.calls % 3)


def test_processors_go_on_for_rows_that_have_ended() -> None:
    model, call = tiny_models.build("llama"), given("llama")
    found = []
    for speculation in ({}, {"spec_strategy": "lookup"}):
        rule = criteria.Recording()
        options = {**call, **speculation, "logits_processor": [Counting()]}
        model.generate(**options, stopping_criteria=StoppingCriteriaList([rule]))
        found.append(torch.stack(rule.scores or []))
    torch.testing.assert_close(found[0], found[1], atol=2e-4, rtol=1e-4)


def test_the_cache_goes_on_as_after_plain_decoding() -> None:
    """Padding that was run for the criteria is not added to the returned cache again."""
    model, call = tiny_models.build("llama"), given("llama")
    rules = [criteria.AfterCalls(14)]
    output, expected = criteria.compare(model, call, rules, {"spec_strategy": "lookup"})
    for ours, theirs in zip(
        output_cache(output).layers, output_cache(expected).layers, strict=True
    ):
        prompt = call["attention_mask"].bool()
        real = torch.nn.functional.pad(prompt, (0, theirs.keys.shape[2] - prompt.shape[1]), value=1)
        for row, kept in enumerate(real.bool()):
            torch.testing.assert_close(
                ours.keys[row][:, kept], theirs.keys[row][:, kept], atol=2e-4, rtol=1e-4
            )
