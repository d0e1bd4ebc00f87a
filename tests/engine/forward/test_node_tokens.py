"""Virtual nodes, never accepted or counted, and embedded by their drafter; device tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.node_tokens import DeviceTokens
from hf_spec.engine.runner import ModelRunner
from tests.tiny_models import VOCAB, build, repetitive_prompt

# Node 0 is the root; 1 and 2 are virtual, 3 and 4 are tokens, 5 is virtual below 4.
TOKENS = [7, -1, -1, 20, 21, -2]
PARENTS = [-1, 0, 1, 0, 3, 4]


def start(**options: Any) -> GenerationState:
    prompt = torch.tensor([[5, 6, 7]])
    stop = StopRules([MaxLengthCriteria(50)], 1)
    return GenerationState.create(prompt, torch.ones_like(prompt), stop, **options)


def tree() -> DraftTree:
    return DraftTree.from_rows([(TOKENS, PARENTS)])


class AnyVector:
    """Virtual tokens that all have the same embedding."""

    def __init__(self, vector: Tensor, acts_on_layers: bool = False):
        self.vector = vector
        self.acts_on_layers = acts_on_layers
        self.acted: list[list[int]] = []

    @contextmanager
    def active(self, model: PreTrainedModel) -> Iterator[None]:
        yield

    def embed(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        embeddings = model.get_input_embeddings()(token_ids.clamp_min(0))
        embeddings[token_ids < 0] = self.vector
        return embeddings

    @contextmanager
    def acting(self, token_ids: Tensor) -> Iterator[Tensor]:
        self.acted.append(token_ids[token_ids < 0].tolist())
        yield (token_ids < 0).flatten()


def test_the_tree_counts_tokens_alone() -> None:
    drafted = tree()
    assert drafted.num_drafted(0) == 2
    assert drafted.height(0) == 2
    assert drafted.children[0] == [1, 3]
    assert drafted.proposals(0) == [3]
    assert drafted.proposals(4) == []


@pytest.mark.parametrize("penalty", [False, True], ids=["plain", "penalty"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("first", [20, 30, 0, VOCAB - 1, VOCAB - 2])
def test_node_draw_never_goes_there(first: int, do_sample: bool, penalty: bool) -> None:
    logits = torch.zeros(len(TOKENS), VOCAB)
    logits[0, first] = logits[3, 21] = logits[4, 9] = 1000.0
    # The logits of virtual nodes verify nothing.
    logits[[1, 2, 5], 33] = 5000.0
    processors = [RepetitionPenaltyLogitsProcessor(1.1)] if penalty else []
    state = start(do_sample=do_sample)
    verdict = NodeDraw(processors, 1).verify(tree(), logits, state)
    if first == 20:
        assert verdict.tokens(0) == [20, 21, 9]
    else:
        assert verdict.tokens(0) == [first]
    state.commit(verdict)
    assert min(state.tokens[0]) >= 0
    row = state.stats.rows[0]
    assert (row.target_forwards, row.drafted_tokens) == (1, 2)
    assert row.drafted_by_position == [1, 1]


def test_a_tree_of_virtual_nodes_alone_drafts_nothing() -> None:
    state = start()
    nothing = DraftTree.from_rows([([7, -1, -1], [-1, 0, 1])])
    logits = torch.zeros(3, VOCAB)
    logits[0, 11] = 1.0
    state.commit(NodeDraw([], 1).verify(nothing, logits, state))
    assert state.tokens[0][-1] == 11
    row = state.stats.rows[0]
    assert (row.target_forwards, row.drafted_tokens, row.accepted_tokens) == (1, 0, 0)
    assert row.drafted_by_position == []


def test_residual_rejection_passes_them_over() -> None:
    draft_probs = torch.full((len(TOKENS), VOCAB), 1 / VOCAB)
    sampled = DraftTree.from_rows([(TOKENS, PARENTS)], draft_probs=draft_probs)
    logits = torch.zeros(len(TOKENS), VOCAB)
    logits[0, 20] = logits[3, 21] = logits[4, VOCAB - 1] = 1000.0
    verdict = ResidualRejection([], 1).verify(sampled, logits, start(do_sample=True))
    assert verdict.tokens(0) == [20, 21, VOCAB - 1]


@pytest.mark.parametrize("acts", [False, True], ids=["embeddings", "layers"])
@pytest.mark.parametrize("name", ["llama", "gemma", "gemma3", "bloom", "falcon_alibi", "gpt2"])
def test_the_runner_embeds_them_and_leaves_the_rest(name: str, acts: bool) -> None:
    model = build(name)
    prompt = repetitive_prompt()[0].tolist()
    embedding: Any = model.get_input_embeddings()
    with torch.no_grad():
        # A virtual token embedded as token 40: its node has the logits of the model after 40.
        virtual = AnyVector(embedding(torch.tensor(40)), acts)
    runner = ModelRunner(model, 1, virtual_tokens=virtual)
    drafted = DraftTree.from_rows([([prompt[-1], -1, -1, 20], [-1, 0, 1, 0])])
    with torch.no_grad(), runner.active():
        logits = runner.forward(drafted, [prompt]).logits
        assert virtual.acted == ([[-1, -1]] if acts else [])
        for node, path in enumerate(([], [40], [40, 40], [20])):
            expected = model(torch.tensor([[*prompt, *path]])).logits[0, -1]
            torch.testing.assert_close(logits[node], expected, atol=2e-4, rtol=1e-4)
        # Their keys and values are dropped; a forward pass without them does not act on the layers.
        runner.keep([[3]])
        assert runner.rows.stored == [len(prompt) + 1]
        root = DraftTree.from_rows([([33], [-1])])
        logits = runner.forward(root, [[*prompt, 20, 33]]).logits
        assert virtual.acted == ([[-1, -1]] if acts else [])
        expected = model(torch.tensor([[*prompt, 20, 33]])).logits[0, -1]
        torch.testing.assert_close(logits[0], expected, atol=2e-4, rtol=1e-4)


def test_tokens_of_a_verdict_have_none() -> None:
    verdict = Verdict(tree(), [[3, 4]], [9])
    assert verdict.tokens(0) == [20, 21, 9]


def test_device_tokens_move_with_their_bits() -> None:
    meta = torch.device("meta")
    moved = DeviceTokens(torch.arange(3), torch.zeros(3, 1, dtype=torch.uint8)).to(meta)
    assert moved.sees is not None
    assert (moved.tokens.device, moved.sees.device) == (meta, meta)
    assert DeviceTokens(torch.arange(3)).to(meta).sees is None
