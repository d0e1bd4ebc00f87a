"""Defaults of drafters, and stock assisted decoding of transformers with our drafters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper

from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.draft_model.loading import DraftConfig
from hf_spec.methods.lookup.drafter import LookupConfig, LookupDrafter
from tests import tiny_models
from tests.model_watch import snapshot

CHAINS: dict[str, Callable[[str], Drafter]] = {
    "lookup": lambda name: LookupDrafter(LookupConfig(max_matches=1)),
    "draft": lambda name: DraftModelDrafter(DraftConfig(), tiny_models.draft_model(name)),
    "draft, heuristic": lambda name: DraftModelDrafter(
        DraftConfig(length_policy="heuristic"), tiny_models.draft_model(name)
    ),
}


class Kept:
    """Recorder of the number of matches that transformers reports to a drafter."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.matches: list[int] = []
        self.observe = drafter.update_candidate_strategy

    def update(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        self.matches.append(int(num_matches))
        self.observe(input_ids, scores, num_matches)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["gemma3", "llama", "qwen2"])
def test_stock_assisted_decoding_with_our_drafter(
    name: str, chain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.build(name)
    prompt = tiny_models.prompts(name, "one")
    plain = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    drafter = CHAINS[chain](name)
    kept = Kept(drafter)
    monkeypatch.setattr(drafter, "update_candidate_strategy", kept.update)
    before = snapshot(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_get_candidate_generator", lambda *_, **__: drafter, raising=False)
        # Any setting that makes generate() choose assisted decoding; our drafter replaces its own.
        assisted = model.generate(
            **prompt, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=3
        )
    assert torch.equal(assisted, plain)
    assert sum(kept.matches) > 0
    assert len(kept.matches) < 24
    assert snapshot(model) == before


def test_candidates_extend_the_prompt_and_have_no_probabilities() -> None:
    drafter = LookupDrafter(LookupConfig(max_matches=1))
    prompt = tiny_models.repetitive_prompt()
    candidates, logits = drafter.get_candidates(prompt)
    assert logits is None
    assert torch.equal(candidates[:, : prompt.shape[1]], prompt)
    assert candidates[0, prompt.shape[1] :].tolist() == prompt[0, :7].tolist()


def test_a_one_token_prompt_leaves_room_for_a_draft() -> None:
    drafter = DraftModelDrafter(DraftConfig(max_draft_tokens=9), tiny_models.draft_model("llama"))
    prompt = torch.tensor([[5]])
    candidates, _ = drafter.get_candidates(prompt)
    plain = tiny_models.draft_model("llama").generate(prompt, max_new_tokens=9, do_sample=False)
    count = candidates.shape[1]
    assert count > 1
    assert torch.equal(candidates, plain[:, :count])


@pytest.mark.parametrize(("samples", "rule"), [(False, NodeDraw), (True, ResidualRejection)])
def test_the_rule_that_fits_the_drafts(samples: bool, rule: type) -> None:
    drafter = LookupDrafter(LookupConfig())
    drafter.samples = samples
    verifier = drafter.make_verifier([TopKLogitsWarper(3)], 2)
    assert type(verifier) is rule
    assert len(verifier.processors) == 1


def test_nothing_is_counted_by_default() -> None:
    assert LookupDrafter(LookupConfig()).counters == {}
    with pytest.raises(TypeError):
        Drafter.counters["shared"] = 1  # type: ignore[index]


class Counted(LookupDrafter):
    """Drafter that records the generations it starts."""

    def __init__(self) -> None:
        super().__init__(LookupConfig())
        self.started: list[GenerationState] = []

    def start(self, state: GenerationState) -> None:
        self.started.append(state)
        super().start(state)


def test_a_generation_starts_once_however_often_it_is_active() -> None:
    drafter = Counted()
    ids = tiny_models.repetitive_prompt()
    first, second = (
        GenerationState.create(ids, torch.ones_like(ids), StopRules([], 1)) for _ in range(2)
    )
    for state in (first, first, second, second):
        with drafter.active(state):
            drafter.draft(state, state.draft_limits)
    assert len(drafter.started) == 2
    assert drafter.started[0] is first
    assert drafter.started[1] is second


def test_what_a_drafter_says_of_its_use_beside_others() -> None:
    lookup = LookupDrafter(LookupConfig())
    assert not lookup.exclusive_tree
    assert lookup.timing_key != LookupDrafter(LookupConfig()).timing_key
    own = LookupDrafter(LookupConfig())
    own.virtual_tokens = object()  # type: ignore[assignment]
    assert own.exclusive_tree
    model = tiny_models.draft_model("llama")
    first, second = (DraftModelDrafter(DraftConfig(max_draft_tokens=n), model) for n in (3, 4))
    assert [first.max_depth, second.max_depth] == [3, 4]
    assert first.timing_key == second.timing_key
