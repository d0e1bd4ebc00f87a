"""The recorder stores the draft model's proposals and does not change the response."""

from __future__ import annotations

import torch

from examples.studies.length_policies.traces import RANKS, SCALE, record
from tests.tiny_models import build, draft_model, prompts


def test_a_record_has_the_greedy_answer_and_what_the_draft_model_predicts() -> None:
    ids = prompts("llama", "one")["input_ids"]
    answer, proposals = record(build("llama"), {"draft": draft_model("llama")}, ids, 12)
    plain = build("llama").generate(ids, max_new_tokens=12, do_sample=False)
    assert answer == plain[0, ids.shape[1] :].tolist()
    # The last token is not drafted: there is room only for the bonus token.
    assert len(proposals["draft"]) == len(answer)
    for position in range(len(answer) - 1):
        text = torch.tensor([[*ids[0].tolist(), *answer[:position]]])
        with torch.no_grad():
            probs = draft_model("llama")(text).logits[0, -1].softmax(-1)
        chances, tokens = probs.topk(RANKS)
        found = proposals["draft"][position]
        assert found[::2] == tokens.tolist()
        expected = [SCALE * chance for chance in chances.tolist()]
        assert all(abs(n - e) <= 5 for n, e in zip(found[1::2], expected, strict=True))
