"""Training pairs of heads: shifts, truncated prompts, and stored or computed features."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec.training.features import Text, text_features
from hf_spec.training.pairs import read_pairs
from hf_spec.training.responses import Response


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response]) -> list[Text]:
    found = text_features(model, responses)
    return [Text(r, f.bfloat16()) for r, f in zip(responses, found, strict=True)]


class TestPairs:
    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    def test_a_place_is_answered_k_pairs_on(self, model: PreTrainedModel, k: int) -> None:
        """Tokens and features equal their positions, so the shifts are visible."""
        prompt, answer = [0, 1, 2, 3, 4, 5], [6, 7, 8, 9]
        width = model.config.hidden_size
        features = torch.arange(9.0)[:, None].expand(9, width).bfloat16()
        pairs = read_pairs(model, [Text(Response("a", "t", prompt, answer), features)], k)
        # Pair i is token i + 1 with feature i.
        assert pairs.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
        assert pairs.features[0, :, 0].tolist() == list(range(9))
        # Output i predicts token i + k + 1 and feature i + k, for exactly the answer tokens.
        assert (pairs.positions + k + 1).tolist() == answer
        assert pairs.tokens[pairs.rows, pairs.positions + k].tolist() == answer
        truth = pairs.features[pairs.rows, pairs.positions + k, 0]
        assert truth.tolist() == [token - 1 for token in answer]
        assert pairs.span == [(5 - k, 9 - k)]

    def test_texts_shorter_than_a_block(self, model: PreTrainedModel) -> None:
        response = Response("a", "t", [5], [6, 7])
        features = torch.zeros(2, model.config.hidden_size)
        pairs = read_pairs(model, [Text(response, features)] * 2, 4)
        assert pairs.counts == [0, 0]
        pairs = read_pairs(model, [Text(response, features)] * 2, 1)
        # With a one-token prompt, no output predicts the first answer token.
        assert pairs.counts == [1, 1]
        assert pairs.tokens[pairs.rows, pairs.positions + 1].tolist() == [7, 7]

    def test_prompts_are_cut(self, model: PreTrainedModel, texts: list[Text]) -> None:
        whole, cut = read_pairs(model, texts, 2), read_pairs(model, texts, 2, max_context=3)
        assert cut.tokens.shape[1] < whole.tokens.shape[1]
        assert cut.counts == whole.counts
        for at in (0, 2):
            for name in ("tokens", "features"):
                one, other = (getattr(p, name)[p.rows, p.positions + at] for p in (whole, cut))
                assert torch.equal(one, other)

    @pytest.mark.parametrize("k", [1, 2])
    def test_prompts_may_be_learned(
        self, model: PreTrainedModel, texts: list[Text], k: int
    ) -> None:
        answers = read_pairs(model, texts, k)
        for context in (None, 3):
            pairs = read_pairs(model, texts, k, context, learn_prompts=True)
            for text, (first, stop), (begin, end) in zip(
                texts, pairs.span, answers.span, strict=True
            ):
                read = min(len(text.response.prompt), context or len(text.response.prompt))
                # The span covers every token that is read, except the first ones.
                assert (first, stop) == (0, read + len(text.response.response) - 1 - k)
                assert end - begin <= stop - first

    def test_features_are_computed_where_they_are_missing(
        self, model: PreTrainedModel, texts: list[Text]
    ) -> None:
        stored = read_pairs(model, texts[:4], 2)
        fresh = read_pairs(model, [Text(text.response) for text in texts[:4]], 2)
        torch.testing.assert_close(fresh.features.bfloat16(), stored.features)
