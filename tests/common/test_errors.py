"""Error classes, and the state of models after an exception during generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_spec
from hf_spec import AssistantError, OptionError, SpecError, UnsupportedError
from hf_spec.common.errors import choices
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.methods.lookup.drafter import LookupDrafter
from tests.model_watch import snapshot
from tests.tiny_models import build, repetitive_prompt

PROMPT = repetitive_prompt()

# One model with packed inputs, one that needs padded inputs and a patched position bias.
TARGETS = ["llama", "bloom"]


class Break(Exception):  # noqa: N818 - stands for whatever a user's code may raise
    pass


@pytest.mark.parametrize("kind", [AssistantError, OptionError, UnsupportedError])
def test_every_error_is_a_spec_error_and_a_value_error(kind: type) -> None:
    assert issubclass(kind, SpecError)
    assert issubclass(kind, ValueError)


def test_choices_say_what_was_meant() -> None:
    known = ("lookup", "draft")
    assert choices("lokup", known) == "did you mean 'lookup'? known: lookup, draft"
    for far in ("medusa", 3, None, ["lookup"]):
        assert choices(far, known) == "known: lookup, draft"


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    """Yield a model, then check that it is unchanged and still generates the same output."""
    model = build(request.param)
    plain = model.generate(PROMPT, max_new_tokens=12)
    before = snapshot(model)
    yield model
    assert snapshot(model) == before
    assert torch.equal(model.generate(PROMPT, max_new_tokens=12), plain)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=12, spec_strategy="lookup"), plain)


STRATEGIES: list[dict[str, Any]] = [
    {"spec_strategy": "lookup"},
    {"spec_strategy": "tree", "assistant": 1},
    {"spec_strategy": "draft", "assistant": "itself"},
]


def arguments(choice: dict[str, Any], target: PreTrainedModel) -> dict[str, Any]:
    assistants = {1: hf_spec.truncated_draft(target, 1), "itself": target}
    return {**choice, "assistant": assistants.get(choice.get("assistant"))}


@pytest.mark.parametrize("choice", STRATEGIES, ids=[s["spec_strategy"] for s in STRATEGIES])
class TestBreakingOff:
    def test_in_a_processor(self, target: PreTrainedModel, choice: dict[str, Any]) -> None:
        def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] > 25:
                raise Break
            return scores

        with pytest.raises(Break):
            target.generate(
                PROMPT,
                max_new_tokens=12,
                logits_processor=[processor],
                **arguments(choice, target),
            )

    def test_in_a_criterion(self, target: PreTrainedModel, choice: dict[str, Any]) -> None:
        def criterion(input_ids: Tensor, scores: Any) -> bool:
            if input_ids.shape[1] > 25:
                raise Break
            return False

        with pytest.raises(Break):
            target.generate(
                PROMPT,
                max_new_tokens=12,
                stopping_criteria=[criterion],
                **arguments(choice, target),
            )

    def test_by_ctrl_c_in_a_streamer(self, target: PreTrainedModel, choice: dict[str, Any]) -> None:
        class Streamer:
            received = 0

            def put(self, value: Tensor) -> None:
                self.received += 1
                if self.received == 3:
                    raise KeyboardInterrupt

            def end(self) -> None:
                pytest.fail("the stream did not end")

        with pytest.raises(KeyboardInterrupt):
            target.generate(
                PROMPT, max_new_tokens=12, streamer=Streamer(), **arguments(choice, target)
            )

    def test_in_the_forward_pass(self, target: PreTrainedModel, choice: dict[str, Any]) -> None:
        calls = []

        def hook(module: Any, inputs: Any, output: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise Break

        head = target.get_output_embeddings()
        with head.register_forward_hook(hook), pytest.raises(Break):
            target.generate(PROMPT, max_new_tokens=12, **arguments(choice, target))


@pytest.mark.parametrize("verb", ["draft", "observe"])
def test_breaking_off_in_a_drafter(
    target: PreTrainedModel, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = getattr(LookupDrafter, verb)
    calls = []

    def breaks(self: LookupDrafter, *args: Any) -> DraftTree:
        calls.append(1)
        if len(calls) == 3:
            raise Break
        return works(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LookupDrafter, verb, breaks)
        with pytest.raises(Break):
            target.generate(PROMPT, max_new_tokens=12, spec_strategy="lookup")


def test_an_error_in_a_draft_model_leaves_both_models_as_they_were(
    target: PreTrainedModel,
) -> None:
    draft = hf_spec.truncated_draft(target, 2)
    before = snapshot(draft)

    def breaks(*_: Any) -> None:
        raise Break

    with draft.register_forward_hook(breaks), pytest.raises(Break):
        target.generate(PROMPT, max_new_tokens=12, spec_strategy="draft", assistant=draft)
    assert snapshot(draft) == before
