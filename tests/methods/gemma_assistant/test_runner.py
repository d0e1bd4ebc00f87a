"""The runner of a Gemma assistant: states of rows, and that models stay unchanged."""

from __future__ import annotations

import torch

from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.engine.decode.loop import speculative_step
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.gemma_assistant.drafter import GemmaAssistantConfig, GemmaAssistantDrafter
from hf_spec.methods.gemma_assistant.head import build
from hf_spec.methods.gemma_assistant.runner import AssistantRunner
from tests.gemma_reference import gemma4, published
from tests.methods.draft_model.test_drafter import start
from tests.tiny_models import ragged_batch


@torch.no_grad()
def test_a_row_drafts_once_the_target_has_run_it() -> None:
    model = gemma4()
    config = GemmaAssistantConfig(max_draft_tokens=2, length_policy="static")
    assistant = build(published(model), model)
    drafter = GemmaAssistantDrafter(config, LengthPolicy(2), assistant, model)
    state = start(ragged_batch((5, 3)))
    target = ModelRunner(model, 2, drafter.hidden_layers)
    with target.active(), drafter.active(state):
        verifier = NodeDraw([], 2)
        speculative_step(target, drafter, verifier, state)
        assert drafter.forwards == 0
        tree = drafter.draft(state, {0: 2, 1: 1})
        assert [tree.height(row) for row in (0, 1)] == [2, 1]
        assert drafter.forwards == 2
        drafter.restart(1)
        assert [drafter._runner.can_draft(row) for row in (0, 1)] == [True, False]
        tree = drafter.draft(state, {0: 2, 1: 2})
        assert [tree.height(row) for row in (0, 1)] == [2, 0]


def test_the_assistant_is_as_it_was_found() -> None:
    model = gemma4()
    assistant = build(published(model), model)
    before = {name: dict(vars(module)) for name, module in assistant.named_modules()}
    with AssistantRunner(assistant, model.get_input_embeddings()).active():
        pass
    after = {name: dict(vars(module)) for name, module in assistant.named_modules()}
    assert before.keys() == after.keys()
    assert all(before[name].keys() == after[name].keys() for name in before)
