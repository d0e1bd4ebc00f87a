"""Decoding loop: exact lengths, and no forward pass of finished rows or padding."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MaxLengthCriteria
from transformers.generation import EosTokenCriteria

from hf_spec import TreeConfig
from hf_spec.common.compat import output_cache
from hf_spec.engine.decode import generation_state
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import speculative_decode, speculative_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.lookup.drafter import LookupConfig, LookupDrafter
from tests import tiny_models
from tests.tiers import FEW_STRATEGIES


def decode(batch: dict[str, Tensor], eos: list[int], **watched: Any) -> GenerationState:
    """Decode with llama and manually assembled parts; the default drafter is lookup."""
    num_rows, width = batch["input_ids"].shape
    stop = StopRules([MaxLengthCriteria(width + 24), EosTokenCriteria(eos)], num_rows)
    state = GenerationState.create(*batch.values(), stop)
    target = watched.get("target") or ModelRunner(tiny_models.build("llama"), num_rows)
    drafter = watched.get("drafter") or LookupDrafter(LookupConfig())
    with torch.no_grad(), target.active(), drafter.active(state):
        speculative_decode(target, drafter, NodeDraw([], num_rows), state)
    return state


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
def test_the_length_is_exact(strategy: str, new_tokens: int) -> None:
    prompt = tiny_models.prompts("gemma3", "ragged")
    output = tiny_models.build("gemma3").generate(
        **prompt,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **tiny_models.speculation("gemma3", strategy),
    )
    assert output.sequences.shape[1] == prompt["input_ids"].shape[1] + new_tokens
    if new_tokens == 1:
        assert output.spec_stats.drafted_tokens == 0, "the only token is the target's own"
        assert output.spec_stats.draft_forwards == 0


@pytest.mark.parametrize("waits", [False, True])
def test_tokens_are_streamed_during_the_next_forward_pass(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens wait only on an asynchronous device; an error in a draft withholds none of them."""
    kinds = {"cpu"} if waits else {"cuda"}
    monkeypatch.setattr(generation_state, "transfer", SimpleNamespace(ASYNCHRONOUS=kinds))
    prompt = tiny_models.settled_prompt("llama")
    stop = StopRules([MaxLengthCriteria(prompt.shape[1] + 8)], 1)
    blocks: list[tuple[int, list[int]]] = []
    target = ModelRunner(tiny_models.build("llama"), 1)
    streamer = SimpleNamespace(put=lambda ids: blocks.append((target.forwards, ids.tolist())))
    state = GenerationState.create(prompt, torch.ones_like(prompt), stop, streamer=streamer)
    drafter, verifier = LookupDrafter(LookupConfig(max_draft_tokens=1)), NodeDraw([], 1)
    with torch.no_grad(), target.active(), drafter.active(state):
        for number in (1, 2):
            speculative_step(target, drafter, verifier, state)
            assert [count for count, _ in blocks] == list(range(1 + waits, number + 1))
        monkeypatch.setattr(drafter, "draft", fail)
        with pytest.raises(KeyError, match="no draft"):
            speculative_step(target, drafter, verifier, state)
    assert [token for _, ids in blocks for token in ids] == state.tokens[0][prompt.shape[1] :]


def fail(*_: Any) -> DraftTree:
    raise KeyError("no draft")


def test_every_token_run_is_a_prompt_token_or_a_node() -> None:
    """Rows end at different times; the last layer runs exactly the tokens that are counted."""
    batch = tiny_models.prompts("llama", "ragged")
    model = tiny_models.build("llama")
    said = model.generate(**batch, max_new_tokens=24, do_sample=False)[:, -24:]
    eos = [int(said[2, 3]), int(said[3, 9])]
    counts: list[int] = []

    def count(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts.append(args[0].shape[:-1].numel())

    handle = model.model.layers[-1].self_attn.q_proj.register_forward_pre_hook(count)
    try:
        state = decode(batch, eos)
    finally:
        handle.remove()
    rows = state.stats.rows
    prompt_tokens = int(batch["attention_mask"].sum()) - len(rows)
    nodes = sum(row.target_forwards + row.drafted_tokens for row in rows)
    assert sum(counts) == prompt_tokens + nodes
    assert len(counts) == state.stats.target_forwards
    assert len({row.target_forwards for row in rows}) > 1
    assert max(row.target_forwards for row in rows) == state.stats.target_forwards


class StepChecks(DraftModelDrafter):
    """Tree drafter that checks the target's KV cache after every round."""

    def __init__(self, target: ModelRunner):
        super().__init__(TreeConfig(), tiny_models.draft_model("llama"))
        self.target = target
        self.state: GenerationState | None = None
        self.moved = 0
        self.sizes: list[int] = []

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        self.state = state
        return super().draft(state, limits)

    def observe(self, verdict: Verdict, output: Any) -> None:
        super().observe(verdict, output)
        assert self.state is not None
        assert self._runner is not None
        for row in self.state.unfinished:
            length = len(self.state.tokens[row])
            assert self.target.rows.stored[row] == length - 1
            # The draft model has not run the last level of its own draft.
            assert length - 3 <= self._runner.rows.stored[row] < length
        self.moved += any(path != list(range(1, len(path) + 1)) for path in verdict.paths)
        self.sizes.append(self.target.rows.pool.nbytes())


def test_what_is_stored_is_what_is_committed_after_every_step() -> None:
    target = ModelRunner(tiny_models.build("llama"), 5)
    drafter = StepChecks(target)
    state = decode(tiny_models.prompts("llama", "ragged"), [], target=target, drafter=drafter)
    assert len(drafter.sizes) == state.stats.target_forwards
    assert drafter.moved > 0, "no branch but the first was ever taken"
    assert len(set(drafter.sizes)) == 1, "memory grew within the first capacity"
    # Every committed token but the newest is in the pool, at its own position.
    plain = tiny_models.build("llama")(torch.tensor([state.tokens[0][:-1]]), use_cache=True)
    keys = output_cache(plain).layers[2].keys[0]
    length = keys.shape[1]
    torch.testing.assert_close(target.rows.pool.keys[2][0, :, :length], keys, atol=2e-4, rtol=1e-4)


@pytest.mark.by_default(strategy=FEW_STRATEGIES, name=("gpt2",))
@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj"])
@pytest.mark.parametrize("strategy", [s for s in tiny_models.STRATEGIES if s != "mtp"])
def test_no_draft_leaves_the_positions_of_the_target(name: str, strategy: str) -> None:
    """Rows that stop by a token at the last position of the target, whose table has 256."""
    model, last = tiny_models.build(name), 255

    def count(ids: Tensor, scores: Tensor) -> Tensor:
        """Count from 3 to 7 again and again, which is easy to draft, and end by 2."""
        ends = ids.shape[1] >= last
        wanted = torch.full_like(ids[:, -1], 2) if ends else 3 + (ids[:, -1] - 2) % 5
        return torch.full_like(scores, -1e9).scatter(1, wanted[:, None], 0)

    numbers = torch.tensor([[3, 4, 5, 6, 7] * 49]).repeat(2, 1)
    mask = torch.ones_like(numbers)
    mask[0, :9] = 0
    options: dict[str, Any] = {"attention_mask": mask, "logits_processor": [count]}
    options |= {"max_length": 300, "do_sample": False, "eos_token_id": 2}
    plain = model.generate(numbers, **options)
    assert plain.shape[1] == last + 1
    for _ in range(2):
        drafted = model.generate(numbers, **options, **tiny_models.speculation(name, strategy))
        assert torch.equal(drafted, plain)


def test_past_its_positions_a_target_fails_as_in_plain_generate() -> None:
    prompt = tiny_models.repetitive_prompt(250)
    model: Any = tiny_models.build("gpt2")
    options: dict[str, Any] = {"do_sample": False, "spec_strategy": "lookup"}
    assert model.generate(prompt, max_length=257, **options).shape[1] == 257
    with pytest.raises(IndexError):
        model.generate(prompt, max_length=258, **options)
