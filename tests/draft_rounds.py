"""Rounds of a ragged batch whose drafts are compared with a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.loop import speculative_step
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.runner import ModelRunner
from tests.methods.draft_model.test_drafter import start
from tests.plain_logits import path_to
from tests.tiny_models import ragged_batch

LENGTHS = (12, 9, 3)
TOLERANCE = 1e-5
# (tokens of a row, drafted path) -> (V,) logits of the next token.
Expected = Callable[[list[int], list[int]], Tensor]


@torch.no_grad()
def check_rounds(model: PreTrainedModel, drafter: Drafter, expected: Expected) -> int:
    """Compare the drafts of two rounds of a ragged batch with a reference.

    One round without a comparison comes first. Returns the accepted tokens of the two rounds.
    """
    state = start(ragged_batch(LENGTHS))
    target = ModelRunner(model, state.num_rows, drafter.hidden_layers)
    accepted = 0
    with target.active(), drafter.active(state):
        verifier = NodeDraw([], state.num_rows)
        speculative_step(target, drafter, verifier, state)
        for _ in range(2):
            texts = [list(tokens) for tokens in state.tokens]
            tree = drafter.draft(state, state.draft_limits)
            for row, text in enumerate(texts):
                for node in tree.nodes(row):
                    if tree.children[node]:
                        check_children(tree, node, expected(text, path_to(tree, node)))
            output = target.forward(tree, state.tokens)
            verdict = verifier.verify(tree, output.logits, state)
            accepted += sum(map(len, verdict.accepted))
            state.commit(verdict)
            target.keep(verdict.paths)
            drafter.observe(verdict, output)
    return accepted


def check_children(tree: Any, node: int, logits: Tensor) -> None:
    probs = logits.softmax(dim=-1)
    children = tree.children[node]
    tokens = [tree.tokens[child] for child in children]
    found = torch.tensor([tree.node_probs[child] for child in children])
    assert (found - probs[tokens]).abs().max() < TOLERANCE
    if len(children) == 1:
        assert tokens == [int(probs.argmax())]
