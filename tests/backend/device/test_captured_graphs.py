"""CUDA graphs on the pretended device: captured by target and head, once for all calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers import MaxLengthCriteria

from hf_spec import BlockConfig, EagleConfig, HeadsConfig, MtpConfig
from hf_spec.adapters.published import read_published
from hf_spec.backend.device import graph_store
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import speculative_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.block.layouts import build_block_head as build_block
from hf_spec.methods.eagle.head import build as build_eagle
from hf_spec.methods.falcon.drafter import FalconDrafter
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.lookup.drafter import LookupConfig, LookupDrafter
from hf_spec.methods.medusa.heads import build_medusa, build_mlp_speculator
from hf_spec.methods.registry import make_drafter
from tests import mtp_reference, tiny_models
from tests.fake_gpu import OnGpu, on_gpu, pretended, recording
from tests.falcon_reference import random_head
from tests.feature_reference import deepspec, dflash, dflash2, medusa, speculator
from tests.generation.test_own_prefill import longrope
from tests.published_heads import sample

NEW_TOKENS = 24


@dataclass
class Family:
    """A kind of head.

    Attributes:
        make: the head for the tiny Llama, on the CPU.
        draft: makes its drafter for a target on the device.
        captures: whether the head's own passes are captured, too.
    """

    make: Callable[[], Any]
    draft: Callable[[Any, Any], Drafter]
    captures: bool = True


def eagle(kind: str, *aux: int) -> Callable[[], Any]:
    def make() -> Any:
        head = read_published(sample(kind).folder)
        assert head is not None
        reading = (("aux_layers", aux),) if aux else ()
        return build_eagle(replace(head, overrides=reading), tiny_models.build("llama"))

    return make


def by_pairs(head: Any, target: Any) -> Drafter:
    config = EagleConfig(max_draft_tokens=3, tree="chain", length_policy="static")
    return PairDrafter(config, head, LengthPolicy(3))


def by_modules(head: Any, target: Any) -> Drafter:
    # The target's embedding is no module of the head.
    head._shared = [target.get_input_embeddings()]
    config = MtpConfig(max_draft_tokens=3, length_policy="static")
    return PairDrafter(config, head, LengthPolicy(3))


def by_blocks(head: Any, target: Any) -> Drafter:
    config = BlockConfig(max_draft_tokens=3, max_nodes=3, length_policy="static")
    return make_drafter(config, target, head)


def by_lists(head: Any, target: Any) -> Drafter:
    tree = [[0], [1], [0, 0], [0, 1]]
    return make_drafter(HeadsConfig(tree=tree, length_policy="static"), target, head)


def by_rank_tree(head: Any, target: Any) -> Drafter:
    return FalconDrafter(head, RankTree.of([[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]))


def llama() -> Any:
    return tiny_models.build("llama")


FAMILIES = {
    "falcon": Family(lambda: random_head("llama"), by_rank_tree),
    "eagle": Family(eagle("eagle3"), by_pairs),
    "eagle, last state": Family(eagle("eagle"), by_pairs),
    "eagle, before the norm": Family(eagle("eagle3", 3, 1, 0), by_pairs),
    "p-eagle": Family(eagle("peagle"), by_pairs),
    "mtp": Family(lambda: mtp_reference.sample("llama", "index").head, by_modules),
    "dflash": Family(lambda: build_block(dflash(), llama()), by_blocks),
    "dflash2": Family(lambda: build_block(dflash2(), llama()), by_blocks),
    "dspark": Family(lambda: build_block(deepspec("vanilla"), llama()), by_blocks),
    "medusa": Family(lambda: build_medusa(medusa(), llama()), by_lists, captures=False),
    "mlp speculator": Family(
        lambda: build_mlp_speculator(speculator(), llama()), by_lists, captures=False
    ),
}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    graph_store.forget()
    yield
    graph_store.forget()


@dataclass
class Call:
    """Graphs of one call, of the target and of the head, and the tokens."""

    target: tuple[int, int, str | None]
    head: tuple[int, int, str | None] | None
    tokens: list[list[int]]


@torch.no_grad()
def decode(model: Any, drafter: Drafter) -> Call:
    ids, mask = (OnGpu(t) for t in tiny_models.ragged_batch((9,)).values())
    length = ids.shape[1] + NEW_TOKENS
    stop = StopRules([MaxLengthCriteria(length)], 1)
    state = GenerationState.create(ids, mask, stop, expected_length=length)
    target = ModelRunner(model, 1, drafter.hidden_layers)
    target.expected_length = length
    with target.active(), drafter.active(state):
        verifier = drafter.make_verifier([], 1)
        while state.unfinished:
            speculative_step(target, drafter, verifier, state)
        graphs: Any = getattr(drafter._runner, "_graphs", None)
        head = None if graphs is None else (graphs.replays, graphs.captures, graphs.refusal)
        return Call(target.graph_counts, head, state.tokens)


def test_a_family_reads_the_state_before_the_norm() -> None:
    assert BEFORE_NORM in eagle("eagle3", 3, 1, 0)().hidden_layers


@pytest.mark.by_default(name=("llama", "gemma3"))
@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_are_captured_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    head = family.make()
    with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
        model = on_gpu(llama())
        drafter = family.draft(on_gpu(head), model)
        first, again = decode(model, drafter), decode(model, drafter)
    assert first.tokens == again.tokens
    assert (first.head is not None) == family.captures
    for before, after in ((first.target, again.target), (first.head, again.head)):
        if before is not None and after is not None:
            replays, captures, refusal = before
            assert refusal is None
            assert captures > 0
            assert after[0] > replays
            assert after[1:] == (0, None)


@pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.24"),
    reason="transformers itself asks the device which frequencies apply",
)
def test_frequencies_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
        model, drafter = on_gpu(longrope()), LookupDrafter(LookupConfig())
        first, again = decode(model, drafter), decode(model, drafter)
    assert first.target[1] > 0
    assert again.target[1:] == (0, None)
