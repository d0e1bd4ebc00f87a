"""Adaptive chains behind many places at once say what they say one by one."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec.models.adaptive_tokens import from_adapter
from hf_spec.training.sdsat_chains import Text, agreement, run_chains
from tests.tiny_models import build, random_adaptive_tokens, repetitive_prompt


class TestRunChains:
    @pytest.mark.parametrize("mode", ["gated", "embeddings"])
    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_sliding", "bloom"])
    @torch.no_grad()
    def test_they_say_what_a_forward_for_each_prefix_says(self, name: str, mode: str) -> None:
        model = build(name)
        tokens = from_adapter(model, random_adaptive_tokens(model, mode, diverse=True))
        texts = [
            Text(repetitive_prompt(seed=1)[0].tolist(), 6),
            Text(repetitive_prompt(length=13, seed=2)[0].tolist(), 1),
        ]
        chains = [[(6, 3), (9, 1), (19, 1)], [(1, 2), (5, 3)]]
        logits, places = run_chains(model, tokens, texts, chains)
        assert places == [
            (row, start + slot)
            for row, mine in enumerate(chains)
            for start, length in mine
            for slot in range(length)
        ]
        found = iter(logits)
        for text, mine in zip(texts, chains, strict=True):
            for start, length in mine:
                ids = torch.tensor([[*text.tokens[:start], *tokens.chain(length)]])
                with tokens.active(model), tokens.embedded(model, ids) as embeddings:
                    expected = model(inputs_embeds=embeddings).logits[0, start:]
                for line in expected:
                    torch.testing.assert_close(next(found), line, atol=3e-4, rtol=1e-4)


class TestAgreement:
    def test_it_counts_what_plain_forwards_say(self, model: PreTrainedModel) -> None:
        tokens = from_adapter(model, random_adaptive_tokens(model, "embeddings"))
        text = Text(repetitive_prompt()[0].tolist(), 15)
        # Positions 15 to 19 are free, so chains of 3 are 3, 3, 3, 2 and 1 long.
        right = []
        with torch.no_grad():
            for start, length in ((15, 3), (16, 3), (17, 3), (18, 2), (19, 1)):
                ids = torch.tensor([[*text.tokens[:start], *[-1] * length]])
                with tokens.embedded(model, ids) as embeddings:
                    choice = model(inputs_embeds=embeddings).logits[0, start:].argmax(dim=-1)
                right.append((choice == torch.tensor(text.tokens[start + 1 :][:length])).tolist())
        figures = agreement(model, tokens, [text], 3, 5)
        for slot in range(3):
            seen = [row[slot] for row in right if len(row) > slot]
            assert figures[f"slot_{slot + 1}"] == pytest.approx(sum(seen) / len(seen))
        runs = [row.index(False) if False in row else len(row) for row in right]
        assert figures["accepted"] == pytest.approx(sum(runs) / 5)
        assert figures["tokens_per_forward"] == 1 + figures["accepted"] / 2
