"""Copies in one block, and decoding rounds in which the host waits only for the verdict."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_spec import DraftConfig, EagleConfig, GsdConfig, TreeConfig
from hf_spec.adapters.published import read_published
from hf_spec.backend.device.transfer import ALIGNMENT, TensorBuffer, fetch, fetch_all, send
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import finish_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.eagle.head import build as build_eagle
from hf_spec.methods.falcon.drafter import FalconDrafter
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.lookup.drafter import LookupConfig, LookupDrafter
from hf_spec.methods.sdsat.adaptive_tokens import AdaptiveShape, AdaptiveTokens
from hf_spec.methods.sdsat.drafter import SdsatConfig, SdsatDrafter
from tests import tiny_models
from tests.fake_gpu import DEVICE, FakeGpu, OnGpu, on_gpu, pretended, recording
from tests.falcon_reference import random_head
from tests.published_heads import sample

NEW_TOKENS = 24
MIXED = [
    torch.arange(5),
    torch.tensor([[True, False], [False, True]]),
    torch.zeros(0, 3),
    torch.tensor(2.5),
    torch.arange(6, dtype=torch.int32).view(2, 3),
]


def test_a_block_holds_what_was_put_in() -> None:
    block = TensorBuffer(MIXED, torch.device("cpu"))
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


def test_a_block_is_copied_from_another_one_that_may_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy is one transfer, from a separate pinned buffer."""
    staged = TensorBuffer(MIXED, torch.device("cpu"))
    staged.fill(MIXED)
    with pretended(monkeypatch) as gpu:
        block = TensorBuffer(MIXED, DEVICE)
        pinned: list[Any] = []
        make = torch.empty

        def empty(*sizes: Any, **options: Any) -> Any:
            pinned.append(options.get("pin_memory"))
            return make(*sizes, **options)

        monkeypatch.setattr(torch, "empty", empty)
        block.copy(staged)
        assert pinned == [True]
        assert (gpu.sends, gpu.fetches, gpu.waits) == (1, 0, {})
        assert [fetch(tensor) for tensor in block.tensors] == [t.tolist() for t in MIXED]


def test_several_tensors_come_back_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.tensor([[5, 2**24 - 1], [0, 7]]), torch.rand(2, 1), torch.zeros(0)]
    lists = [tensor.tolist() for tensor in tensors]
    assert fetch_all(tensors) == lists
    with pretended(monkeypatch) as gpu:
        sent = send(tensors, DEVICE)
        assert fetch_all(sent) == lists
        assert (gpu.fetches, gpu.waits) == (1, {})


def test_copies_without_pinned_memory_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS and XPU behave like this."""
    with pretended(monkeypatch, streams=False) as gpu:
        sent = send(MIXED, DEVICE)
        assert [fetch(tensor) for tensor in sent] == [tensor.tolist() for tensor in MIXED]
        assert (gpu.sends, gpu.fetches) == (1, len(MIXED))
        assert sum(gpu.waits.values()) == 1 + len(MIXED)


def test_tensors_that_are_on_the_device_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch) as gpu:
        there = torch.ones(3, device=DEVICE)
        gpu.restart()
        first, same, last = send([MIXED[0], there, MIXED[1]], DEVICE)
        assert same is there
        assert [fetch(first), fetch(last)] == [MIXED[0].tolist(), MIXED[1].tolist()]
        assert (gpu.sends, gpu.launches, gpu.waits) == (1, 0, {})


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
    """Decoding options: how drafts are made, and whether tokens are sampled."""

    strategy: str
    sampled: bool = False
    recorded: bool = False
    ends: tuple[int, ...] = ()
    config: DraftConfig | None = None


@dataclass
class Round:
    """Operations of one round on the device, and its verified draft."""

    tree: DraftTree
    waits: dict[str, int]
    sends: int
    fetches: int
    launches: int
    draft_forwards: int


def adaptive_tokens(moved: Callable[[Any], Any]) -> AdaptiveTokens:
    """Return adaptive tokens with an embedding only, that of a token that is often correct."""
    model = tiny_models.build("llama")
    table = nn.Embedding.from_pretrained(model.get_input_embeddings().weight[:1].detach())
    return AdaptiveTokens(AdaptiveShape("embeddings", False, 5), moved(table).weight)


def build_drafter(case: Case, moved: Callable[[Any], Any]) -> Drafter:
    """Return a drafter, after `moved` has put its model or head on the device."""
    strategy = case.strategy
    if strategy == "lookup":
        return LookupDrafter(LookupConfig())
    if strategy == "eagle":
        config = EagleConfig(max_draft_tokens=5, width=4, max_nodes=15, length_policy="static")
        found = read_published(sample("eagle3").folder)
        assert found is not None
        head = build_eagle(found, tiny_models.build("llama"))
        return PairDrafter(config, moved(head), LengthPolicy(5))
    if strategy == "falcon":
        return FalconDrafter(moved(random_head("llama")), RankTree.of(tiny_models.wide_tree()))
    if strategy == "sdsat":
        return SdsatDrafter(SdsatConfig(), adaptive_tokens(moved))
    config = case.config or (DraftConfig() if strategy == "draft" else TreeConfig())
    return DraftModelDrafter(config, moved(tiny_models.draft_model("llama")))


def decode(case: Case, num_rows: int, gpu: FakeGpu | None) -> tuple[GenerationState, list[Round]]:
    """Decode, on the fake GPU if there is one; return the state and a record of every round."""
    moved: Callable[[Any], Any] = (lambda module: module) if gpu is None else on_gpu
    settled = tiny_models.settled_prompt("llama")[0]
    batch = tiny_models.left_padded([settled[: len(settled) - 3 * row] for row in range(num_rows)])
    ids, mask = (OnGpu(tensor) if gpu else tensor for tensor in batch.values())
    rules: list[Any] = [MaxLengthCriteria(ids.shape[1] + NEW_TOKENS)]
    rules += [EosTokenCriteria(list(case.ends))] if case.ends else []
    stop = StopRules(rules, num_rows)
    filters = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    processors: list[Any] = filters if case.sampled else []
    options = {"processors": processors, "do_sample": case.sampled}
    state = GenerationState.create(ids, mask, stop, **options)
    drafter = build_drafter(case, moved)
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
            log = gpu or FakeGpu()
            log.restart()
            tree = drafter.draft(state, state.draft_limits)
            readout = verifier.readout(tree, state)
            output = target.forward(tree, state.tokens, readout=readout)
            finish_step(target, drafter, verifier, state, tree, output)
            counts = log.sends, log.fetches, log.launches
            found.append(Round(tree, dict(log.waits), *counts, drafter.forwards - before))
    return state, found


CASES = [
    Case("lookup"),
    Case("draft"),
    Case("tree"),
    Case("eagle"),
    Case("falcon"),
    Case("sdsat"),
    Case("lookup", sampled=True),
    Case("draft", sampled=True),
    Case("lookup", sampled=True, recorded=True),
    Case("draft", sampled=True, recorded=True),
    Case("lookup", recorded=True),
    Case("draft", recorded=True),
    Case("tree", recorded=True),
    Case("eagle", recorded=True),
    Case("falcon", recorded=True),
    Case("sdsat", recorded=True),
]


# Maximum launches of an uncaptured round: a pass of three layers, and the draft's passes.
LAUNCHES = {"lookup": 140, "draft": 690, "tree": 660, "eagle": 550, "falcon": 400, "sdsat": 160}
# Maximum launches of a round whose forward passes are all replayed.
RECORDED = {"lookup": 1, "draft": 60, "tree": 95, "eagle": 170, "falcon": 40, "sdsat": 12}


def name_of(case: Case) -> str:
    extra = [name for name in ("sampled", "recorded") if getattr(case, name)]
    return "-".join([case.strategy, *extra])


@pytest.mark.by_default(
    num_rows=(4,), case=lambda case: case.recorded and case.strategy == "falcon"
)
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
        # One fetch for the verdict, and one for all levels of a draft.
        levels = one.draft_forwards
        known = {1 + min(levels, 1)}
        # SDSAT may also fetch the target's predictions of the previous round.
        assert one.fetches in ({1, 2} if case.strategy == "sdsat" else known)
        # The step, its tree, and accepted tokens to move in the target and in the draft model. Per
        # draft pass, the step and the inputs that a head continues from.
        assert one.sends <= 4 + 3 * levels
        assert one.launches <= LAUNCHES[case.strategy]
    if case.recorded and num_rows == 1:
        assert min(one.launches for one in rounds) <= RECORDED[case.strategy]
    if not case.sampled:
        # Drafts of the untrained EAGLE head are never accepted.
        assert state.stats.accepted_tokens > 0 or case.strategy == "eagle"
        check_same((state, rounds), decode(case, num_rows, None))


Decoded: TypeAlias = tuple[GenerationState, list[Round]]


def check_same(found: Decoded, plain: Decoded) -> None:
    """Check that both have the same tokens and the same drafts."""
    assert found[0].tokens == plain[0].tokens
    for one, other in zip(found[1], plain[1], strict=True):
        assert (one.tree.tokens, one.tree.parent) == (other.tree.tokens, other.tree.parent)
    assert found[0].stats.accepted_by_position == plain[0].stats.accepted_by_position


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", ["lookup", "draft", "tree", "falcon"])
def test_a_device_that_is_not_asynchronous_gives_the_same(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on MPS and XPU, drafts grow on the host, and no tensor on the device is float64."""
    case = Case(strategy)
    with pretended(monkeypatch, streams=False) as gpu:
        found = decode(case, 2, gpu)
    assert torch.float64 not in gpu.dtypes
    assert found[0].stats.accepted_tokens > 0
    check_same(found, decode(case, 2, None))


def test_a_chain_that_nobody_looked_at_ends_with_its_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = decode(Case("draft"), 1, None)[0]
    prompt, end = len(said.tokens[0]) - NEW_TOKENS, said.tokens[0][-4]
    case = Case("draft", ends=(end,))
    plain = decode(case, 1, None)
    assert prompt < len(plain[0].tokens[0]) < len(said.tokens[0])
    with pretended(monkeypatch) as gpu:
        found = decode(case, 1, gpu)
    assert max(one.fetches for one in found[1]) == 2
    check_same(found, plain)


TREES = [
    TreeConfig(children=5, expanded_per_level=3),
    TreeConfig(max_draft_tokens=3, children=2, expanded_per_level=32),
    TreeConfig(min_probability=0.1, min_sibling_ratio=0.3),
    # A policy that sets the length before the draft and never stops it, so the device grows it.
    TreeConfig(max_draft_tokens=2, length_policy="heuristic", max_nodes=6),
    GsdConfig(merge_length=None, expanded_per_level=6, max_draft_tokens=3),
    TreeConfig(batching="unpadded_input"),
]


@pytest.mark.full
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("ends", [(), tuple(range(0, tiny_models.VOCAB, 5))])
@pytest.mark.parametrize("config", TREES, ids=range(len(TREES)))
def test_trees_that_nobody_watched_are_the_same(
    config: TreeConfig, ends: tuple[int, ...], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("tree", ends=ends, recorded=recorded, config=config)
    with ExitStack() as stack:
        gpu = stack.enter_context(pretended(monkeypatch))
        if recorded:
            stack.enter_context(recording(monkeypatch, gpu))
        found = decode(case, 3, gpu)
    check_same(found, decode(case, 3, None))
    levels = max(one.draft_forwards for one in found[1])
    # Storage with gaps needs masks, which are built on the host.
    watched = config.batching == "unpadded_input"
    assert max(one.fetches for one in found[1]) == 1 + (levels if watched else 1)
