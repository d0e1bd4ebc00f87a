"""DFlash 2: convolutions and candidate selector equal their formulas; mistakes are detected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import BlockConfig
from hf_spec.adapters.published import read_published
from hf_spec.methods.block.dflash2 import CandidateSelector, GroupedConvolution, expected_tensors
from hf_spec.methods.block.layouts import build_block_head
from tests.feature_reference import (
    BLOCK,
    CANDIDATES,
    GROUP,
    RANK,
    SIZE,
    TAPS,
    block_reference,
    check_against,
    convolved,
    dflash2,
    save,
    selected,
    watch_drafts,
)
from tests.methods.block.test_layouts import changed
from tests.methods.block.test_runner import HEADS, gap
from tests.tiny_models import VOCAB, build, prompts

MODEL = build("llama")
TENSORS = dflash2().tensors
NAME = "layers.0.mlp_conv."


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("taps", [1, 2, 3, BLOCK + 1])
def test_each_block_is_convolved_by_itself(taps: int) -> None:
    tensors = dflash2(taps=taps).tensors
    kernel, projection = (
        tensors[NAME + key] for key in ("base_kernel", "kernel_projection.weight")
    )
    normed = random(2 * BLOCK, SIZE)
    found = GroupedConvolution(kernel, projection, BLOCK).around(torch.tanh, normed[None])[0]
    for block, part in enumerate(normed.split(BLOCK)):
        inner = convolved(tensors, NAME, 0, part, part).tanh()
        wanted = convolved(tensors, NAME, 1, inner, part)
        assert (found[block * BLOCK :][:BLOCK] - wanted).abs().max() < 1e-5


def test_only_candidates_can_be_drafted() -> None:
    outputs, logits = random(3, SIZE), random(3, VOCAB)
    tokens = torch.tensor([5, 0, 96])
    found = CandidateSelector(TENSORS, CANDIDATES)(tokens, outputs, logits)
    assert (found.isfinite().sum(dim=1) == CANDIDATES).all()
    for row, token in enumerate(tokens.tolist()):
        wanted = selected(TENSORS, logits[row], outputs[row], token)
        assert torch.allclose(found[row], wanted, atol=1e-5)


def test_the_token_before_decides_among_the_candidates() -> None:
    """Without this, tests of drafts would not cover the selector."""
    outputs, logits = random(1, SIZE).expand(VOCAB, -1), random(1, VOCAB).expand(VOCAB, -1)
    found = CandidateSelector(TENSORS, CANDIDATES)(torch.arange(VOCAB), outputs, logits)
    assert len(found.argmax(dim=1).unique()) > CANDIDATES // 2


def test_more_candidates_than_tokens_keep_all() -> None:
    selector = CandidateSelector(TENSORS, VOCAB + 1)
    assert selector(torch.tensor([1]), random(1, SIZE), random(1, VOCAB)).isfinite().all()


def test_a_head_without_the_new_parts_is_an_ordinary_one() -> None:
    plain = changed(
        dflash2(), {key: None for key in TENSORS if "_conv" in key or "selector" in key}
    )
    head = build_block_head(plain, MODEL)
    assert head.selector is None
    assert not any("conv" in name for name, _ in head.named_modules())


def test_the_tensors_decide_and_not_the_class(tmp_path: Path) -> None:
    """Some copies are published as DFlash, for servers that support only that class."""
    renamed = changed(dflash2(), architectures=["DFlashDraftModel"])
    found = read_published(save(tmp_path / "head", renamed))
    assert found is not None
    assert found.family == "dflash"
    head = build_block_head(found, MODEL)
    assert head.selector is not None
    assert sum(isinstance(module, GroupedConvolution) for module in head.modules()) == 4


def test_shapes_follow_from_the_tensors() -> None:
    own = {k: tuple(t.shape) for k, t in TENSORS.items() if "_conv" in k or "selector" in k}
    assert expected_tensors(TENSORS, 2, SIZE, VOCAB) == own
    assert own[NAME + "kernel_projection.weight"] == (2 * TAPS * SIZE // GROUP, SIZE)
    assert own["candidate_selector.hidden_projection.weight"] == (RANK, SIZE)


@pytest.mark.parametrize(
    "wrong",
    [
        {NAME + "base_kernel": TENSORS[NAME + "base_kernel"].flip(0)},
        {NAME + "base_kernel": TENSORS[NAME + "base_kernel"].flip(1)},
        {
            "candidate_selector.predecessor_codebook": TENSORS[
                "candidate_selector.successor_codebook"
            ]
        },
    ],
    ids=["sides", "taps", "codebooks"],
)
def test_swapped_parts_are_noticed(
    wrong: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = block_reference(MODEL, dflash2(), False)
    monkeypatch.setattr("tests.methods.block.test_runner.block_reference", lambda *_: right)
    assert gap(*HEADS["DFlash 2"]) < 1e-5
    with pytest.raises(AssertionError):
        # `gap` also fails if the candidates differ.
        assert gap(changed(dflash2(), wrong), False) < 1e-3


def test_the_most_probable_chain_of_a_ragged_batch() -> None:
    """Every round drafts the tokens of the formulas; the output equals plain `generate()`."""
    inputs, limits = prompts("llama", "ragged"), {"max_new_tokens": 10, "do_sample": False}
    with watch_drafts() as seen:
        output = MODEL.generate(
            **inputs,
            **limits,
            spec_strategy=BlockConfig(max_draft_tokens=BLOCK - 1, children=1),
            assistant=dflash2(),
        )
    assert torch.equal(output, MODEL.generate(**inputs, **limits))
    reference: Any = block_reference(MODEL, dflash2(), False)
    rounds = 0
    for tree, texts, unfinished in seen:
        for row in unfinished:
            drafted = [tree.tokens[node] for node in tree.nodes(row)][1:]
            chain: list[int] = []
            while len(chain) < len(drafted):
                chain.append(int(reference(texts[row], chain).argmax()))
            assert drafted == chain
            rounds += bool(drafted)
    assert rounds > 10
    assert check_against(reference, seen, [[0] * n for n in range(1, BLOCK)]) > 30
