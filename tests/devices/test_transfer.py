"""Copies in one block, and rounds of decoding in which the host waits once, for the outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import EosTokenCriteria, MaxLengthCriteria, TopKLogitsWarper

from hf_spec import DraftConfig, TreeConfig
from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.loop import speculative_step
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.stopping import StopRules
from hf_spec.devices.transfer import ALIGNMENT, Block, fetch, fetch_all, send
from hf_spec.drafting.model_drafter import DraftModelDrafter
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.execution.runner import ModelRunner
from hf_spec.models.adaptive_tokens import AdaptiveShape, AdaptiveTokens
from hf_spec.strategies.falcon import FalconDrafter
from hf_spec.strategies.lookup import LookupConfig, LookupDrafter
from hf_spec.strategies.sdsat import SdsatConfig, SdsatDrafter
from tests import tiny_models
from tests.fake_gpu import DEVICE, FakeGpu, OnGpu, on_gpu, pretended, recording
from tests.falcon_reference import random_head

NEW_TOKENS = 12
MIXED = [
    torch.arange(5),
    torch.tensor([[True, False], [False, True]]),
    torch.zeros(0, 3),
    torch.tensor(2.5),
    torch.arange(6, dtype=torch.int32).view(2, 3),
]


def test_a_block_holds_what_was_put_in() -> None:
    block = Block(MIXED, torch.device("cpu"))
    block.fill(MIXED)
    for mine, tensor in zip(block.tensors, MIXED, strict=True):
        assert mine.dtype == tensor.dtype
        assert torch.equal(mine, tensor)
        assert mine.storage_offset() * mine.element_size() % ALIGNMENT == 0
    again = [tensor * 0 if tensor.dtype != torch.bool else ~tensor for tensor in MIXED]
    block.fill(again)
    assert all(map(torch.equal, block.tensors, again))


def test_on_the_host_nothing_is_copied() -> None:
    sent = send(MIXED, torch.device("cpu"))
    assert all(one is other for one, other in zip(sent, MIXED, strict=True))
    assert fetch(MIXED[0]) == [0, 1, 2, 3, 4]


def test_a_block_is_one_transfer_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch) as gpu:
        sent = send(MIXED, DEVICE)
        assert (gpu.sends, gpu.fetches, gpu.waits) == (1, 0, {})
        assert [fetch(tensor) for tensor in sent] == [tensor.tolist() for tensor in MIXED]
        assert (gpu.sends, gpu.fetches, gpu.waits) == (1, len(MIXED), {})
    assert all(isinstance(tensor, OnGpu) for tensor in sent)


def test_several_tensors_come_back_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.tensor([[5, 2**24 - 1], [0, 7]]), torch.rand(2, 1), torch.zeros(0)]
    lists = [tensor.tolist() for tensor in tensors]
    assert fetch_all(tensors) == lists
    with pretended(monkeypatch) as gpu:
        sent = send(tensors, DEVICE)
        assert fetch_all(sent) == lists
        assert (gpu.fetches, gpu.waits) == (1, {})


def test_waiting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests below would prove nothing."""
    with pretended(monkeypatch) as gpu:
        ones = torch.ones(3, device=DEVICE)
        found = []
        for wait in (
            lambda: float(ones.sum()),
            lambda: ones[ones > 0],
            lambda: ones[[0, 2]],
            ones.tolist,
            lambda: torch.arange(3).to(DEVICE),
            lambda: torch.tensor([1], device=DEVICE),
            lambda: torch.multinomial(ones, 1),
            ones.nonzero,
        ):
            gpu.restart()
            wait()
            found.append(sum(gpu.waits.values()))
    assert found == [1] * len(found)


@dataclass
class Case:
    """A way to decode: how drafts are made, and whether tokens are drawn."""

    strategy: str
    sampled: bool = False
    recorded: bool = False
    end: int | None = None


@dataclass
class Round:
    """What a round asked of the device."""

    waits: dict[str, int]
    sends: int
    fetches: int
    launches: int
    draft_forwards: int


def adaptive_tokens(moved: Callable[[Any], Any]) -> AdaptiveTokens:
    """Adaptive tokens that are embeddings alone: that of a token that is often right."""
    model = tiny_models.build("llama")
    table = nn.Embedding.from_pretrained(model.get_input_embeddings().weight[:1].detach())
    return AdaptiveTokens(AdaptiveShape("embeddings", False, 5), moved(table).weight)


def build_drafter(strategy: str, moved: Callable[[Any], Any]) -> Drafter:
    """A drafter whose model or head `moved` has put where it belongs."""
    if strategy == "lookup":
        return LookupDrafter(LookupConfig())
    if strategy == "falcon":
        return FalconDrafter(moved(random_head("llama")), RankTree.of(tiny_models.wide_tree()))
    if strategy == "sdsat":
        return SdsatDrafter(SdsatConfig(), adaptive_tokens(moved))
    config = DraftConfig() if strategy == "draft" else TreeConfig()
    return DraftModelDrafter(config, moved(tiny_models.draft_model("llama")))


def decode(case: Case, num_rows: int, gpu: FakeGpu | None) -> tuple[GenerationState, list[Round]]:
    """Decode on the pretended device if there is one, and say what each round asked of it."""
    moved: Callable[[Any], Any] = (lambda module: module) if gpu is None else on_gpu
    settled = tiny_models.settled_prompt("llama")[0]
    batch = tiny_models.left_padded([settled[: len(settled) - 3 * row] for row in range(num_rows)])
    ids, mask = (OnGpu(tensor) if gpu else tensor for tensor in batch.values())
    rules: list[Any] = [MaxLengthCriteria(ids.shape[1] + NEW_TOKENS)]
    rules += [] if case.end is None else [EosTokenCriteria(case.end)]
    stop = StopRules(rules, num_rows)
    processors = [TopKLogitsWarper(20)] if case.sampled else []
    options = {"processors": processors, "do_sample": case.sampled}
    state = GenerationState.create(ids, mask, stop, **options)
    drafter = build_drafter(case.strategy, moved)
    model, asked = (
        moved(tiny_models.build("llama")),
        (drafter.hidden_layers, drafter.virtual_tokens),
    )
    target = ModelRunner(model, num_rows, *asked)
    found = []
    with torch.no_grad(), target.active(), drafter.active(state):
        verifier = drafter.make_verifier(processors, num_rows)
        while state.unfinished:
            before = drafter.forwards
            if gpu is not None:
                gpu.restart()
            speculative_step(target, drafter, verifier, state)
            if gpu is not None:
                forwards = drafter.forwards - before
                counts = gpu.sends, gpu.fetches, gpu.launches
                found.append(Round(dict(gpu.waits), *counts, forwards))
    return state, found


CASES = [
    Case("lookup"),
    Case("draft"),
    Case("tree"),
    Case("falcon"),
    Case("sdsat"),
    Case("lookup", sampled=True),
    Case("draft", sampled=True),
    Case("lookup", recorded=True),
    Case("draft", recorded=True),
    Case("falcon", recorded=True),
    Case("sdsat", recorded=True),
]


# Most launches of a round as it comes: a forward of three layers, and those that draft.
LAUNCHES = {"lookup": 140, "draft": 690, "tree": 660, "falcon": 400, "sdsat": 160}
# Of a round whose forwards are all replayed.
RECORDED = {"lookup": 5, "draft": 60, "falcon": 40, "sdsat": 12}


def name_of(case: Case) -> str:
    extra = [name for name in ("sampled", "recorded") if getattr(case, name)]
    return "-".join([case.strategy, *extra])


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_round_waits_for_its_outcome_alone(
    case: Case, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    with ExitStack() as stack:
        gpu = stack.enter_context(pretended(monkeypatch))
        if case.recorded:
            stack.enter_context(recording(monkeypatch, gpu))
        state, rounds = decode(case, num_rows, gpu)
    assert len(rounds) > 2
    for one in rounds:
        assert one.waits == {}
        # The verdict; and every level of a tree, but all of a chain or of a head together.
        levels = one.draft_forwards
        known = {1 + (levels if case.strategy == "tree" else min(levels, 1))}
        # What the target predicted in the round before, if it did.
        assert one.fetches in ({1, 2} if case.strategy == "sdsat" else known)
        # The step, its tree, accepted tokens to move here and in the draft model; and by pass the
        # step and what a head goes on from.
        assert one.sends <= 4 + 3 * levels
        assert one.launches <= LAUNCHES[case.strategy]
    if case.recorded and num_rows == 1:
        assert min(one.launches for one in rounds) <= RECORDED[case.strategy]
    if not case.sampled:
        assert state.stats.accepted_tokens > 0
        check_same(state, decode(case, num_rows, None)[0])


def check_same(state: GenerationState, plain: GenerationState) -> None:
    """The same tokens from the same drafts."""
    assert state.tokens == plain.tokens
    assert state.stats.drafted_by_position == plain.stats.drafted_by_position
    assert state.stats.accepted_by_position == plain.stats.accepted_by_position


def test_a_chain_that_nobody_looked_at_ends_with_its_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = decode(Case("draft"), 1, None)[0]
    prompt, end = len(said.tokens[0]) - NEW_TOKENS, said.tokens[0][-4]
    case = Case("draft", end=end)
    plain, _ = decode(case, 1, None)
    assert prompt < len(plain.tokens[0]) < len(said.tokens[0])
    with pretended(monkeypatch) as gpu:
        state, rounds = decode(case, 1, gpu)
    assert max(one.fetches for one in rounds) == 2
    check_same(state, plain)
