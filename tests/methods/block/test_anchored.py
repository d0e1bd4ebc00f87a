"""All blocks of a text in one pass: equal to single blocks and to drafting, without leakage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec.methods.block.anchored import anchored_blocks, use_plain_attention
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import build_block_head
from hf_spec.methods.block.runner import BlockRunner
from hf_spec.methods.block.training import start_head
from hf_spec.training.features import Text, fused_layers, stored_texts
from hf_spec.training.responses import Response
from tests import head_training as checks
from tests.block_training import SETTINGS, one_block, published


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Text]:
    return stored_texts(model, responses, tmp_path / "features", fused_layers(model))


@pytest.fixture
def head(model: PreTrainedModel, texts: list[Text], tmp_path: Path) -> BlockHead:
    return start_head(published(model, texts, tmp_path), model, SETTINGS)


@torch.no_grad()
def test_all_blocks_of_a_pass_equal_single_blocks(model: PreTrainedModel, head: BlockHead) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (2, 10), generator=generator)
    states = torch.randn(2, 9, 3 * 32, generator=generator)
    anchors = torch.tensor([[0, 3, 8], [5, 2, 2]])
    roots = tokens.gather(1, anchors + 1)
    found = anchored_blocks(head, states.chunk(3, dim=-1), roots, anchors)
    for row in range(2):
        for block, position in enumerate(anchors[row].tolist()):
            expected = one_block(model, head, tokens[row].tolist(), position, states[row])
            torch.testing.assert_close(found[row, block], expected, atol=1e-5, rtol=1e-4)


def test_drafts_do_not_depend_on_later_tokens(head: BlockHead) -> None:
    """Gradients reach only states up to the anchor, and blocks do not affect each other."""
    states = torch.randn(1, 9, 3 * 32, requires_grad=True)
    anchors, roots = torch.tensor([[2, 5, 7]]), torch.tensor([[4, 5, 6]])
    outputs = anchored_blocks(head, states.chunk(3, dim=-1), roots, anchors)
    for block, anchor in enumerate(anchors[0].tolist()):
        for position in range(SETTINGS.block_size):
            [slope] = torch.autograd.grad(
                outputs[0, block, position].square().sum(), states, retain_graph=True
            )
            reached = slope[0].abs().sum(-1) > 0
            assert reached.tolist() == [index <= anchor for index in range(9)]
    others = torch.tensor([[9, 5, 11]])
    again = anchored_blocks(head, states.chunk(3, dim=-1), others, anchors)
    torch.testing.assert_close(again[0, 1], outputs[0, 1])
    assert (again[0, 0] - outputs[0, 0]).abs().max() > 1e-3


@torch.no_grad()
def test_training_drafts_what_generation_drafts(
    model: PreTrainedModel, texts: list[Text], tmp_path: Path
) -> None:
    """The training pass has the same outputs as the runner that `generate()` uses."""
    head, text = build_block_head(published(model, texts, tmp_path), model), list(range(3, 15))
    states, _ = checks.states_and_probs(model, text, None)
    parts = [states[layer] for layer in head.hidden_layers]
    runner, found = BlockRunner(head, 1), []
    with runner.active():
        for begin, end in ((0, 8), (8, 11)):
            runner.learn({0: (begin, end - begin)}, [part[begin:end] for part in parts])
            proposed = runner.propose({0: text[end]}, 3)
            found.append([proposed.after(torch.tensor([text[end]]), torch.tensor([0]))])
            found[-1] += [proposed.after(torch.tensor([5]), torch.tensor([0])) for _ in range(2)]
    use_plain_attention(head)
    batch = [part[None] for part in parts]
    anchors = torch.tensor([[7, 10]])
    outputs = anchored_blocks(head, batch, torch.tensor([[text[8], text[11]]]), anchors)
    for block in range(2):
        for level in range(3):
            logits = head.output.over_vocabulary(head.logits(outputs[0, block, level + 1]))
            torch.testing.assert_close(logits, found[block][level][0], atol=1e-4, rtol=1e-4)
