"""Passes of block heads: rounds with a KV cache equal plain torch without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec.adapters.published import PublishedHead
from hf_spec.backend.device.capture import padded_steps
from hf_spec.methods.block import runner as block_runner
from hf_spec.methods.block.layouts import build_block_head
from hf_spec.methods.block.runner import BlockRunner
from tests.feature_reference import (
    BLOCK,
    LAYERS,
    block_reference,
    deepspec,
    dflash,
    dflash2,
    speculators,
    states_of,
)
from tests.tiny_models import VOCAB, WINDOW, build

MODEL = build("llama")
TEXTS = [
    torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in (1, 2)
]
# Known tokens per round and row; the first are prompts. Where a row gains one token, no draft token
# was accepted.
ROUNDS = [(9, 14), (13, 15), (14, 20)]


def sliding(**config: Any) -> PublishedHead:
    head = dflash()
    kinds = ["sliding_attention", "full_attention"]
    window = {"layer_types": kinds, "sliding_window": WINDOW, "use_sliding_window": True}
    return PublishedHead(
        head.family, {**head.config, **window, **config}, head.tensors, head.folder, head.name
    )


def limited(head: PublishedHead, window: int) -> PublishedHead:
    return replace(head, overrides=(("draft_window", window),))


HEADS = {
    "z-lab": (dflash(), False, ((None, False),) * 2),
    "DFlash 2": (dflash2(), False, ((None, False),) * 2),
    "DFlash 2, three taps": (dflash2(taps=3), False, ((None, False),) * 2),
    "DSpark": (deepspec(), True, ((None, False),) * 2),
    "gated": (deepspec("gated"), True, ((None, False),) * 2),
    "rnn": (deepspec("rnn"), True, ((None, False),) * 2),
    "DeepSpec's DFlash": (deepspec(None, confidence=False), True, ((None, False),) * 2),
    "speculators": (speculators(), True, ((None, False),) * 2),
    "speculators, DFlash": (speculators("dflash", None), False, ((None, False),) * 2),
    "rnn from the mask": (
        speculators("dspark", "rnn", sample_from_anchor=False),
        False,
        ((None, False),) * 2,
    ),
    "sliding": (sliding(), False, ((WINDOW, True), (None, False))),
    "sliding, not causal": (sliding(is_causal=False), False, ((WINDOW, False), (None, False))),
    "sliding, non-causal": (
        sliding(sliding_window_non_causal=True),
        False,
        ((WINDOW, False), (None, False)),
    ),
    "a draft window": (limited(dflash2(), 6), False, ((6, False),) * 2),
    "a draft window above that of a layer": (
        limited(sliding(), WINDOW + 2),
        False,
        ((WINDOW, True), (WINDOW + 2, False)),
    ),
    "causal": (sliding(is_causal=True), False, ((WINDOW, True), (None, True))),
}


# Row, number of its known tokens, path, and logits after the path.
Said = tuple[int, int, tuple[int, ...], Tensor]


def rounds(head: PublishedHead) -> list[Said]:
    """Return the logits of every round, with both rows in one pass."""
    block = build_block_head(head, MODEL)
    runner, found = BlockRunner(block, 3), []
    states = [states_of(MODEL, text, LAYERS).split(32, dim=-1) for text in TEXTS]
    known = [0, 0]
    with runner.active():
        for ends in ROUNDS:
            # Slots are not in numerical order, and one is unused.
            spans = {2 * row: (known[row], ends[row] - known[row]) for row in (1, 0)}
            parts = [
                torch.cat([states[row][layer][known[row] : ends[row]] for row in (1, 0)])
                for layer in range(len(LAYERS))
            ]
            runner.learn(spans, parts)
            known = list(ends)
            roots = {2 * row: TEXTS[row][known[row]] for row in (1, 0)}
            proposed = runner.propose(roots, block.shape.num_levels)
            tokens, parents = list(roots.values()), [0, 1]
            paths: list[tuple[int, ...]] = [(), ()]
            for level in range(block.shape.num_levels):
                logits = proposed.after(torch.tensor(tokens), torch.tensor(parents))
                found += [
                    (1 - place, known[1 - place], paths[place], logits[place]) for place in (0, 1)
                ]
                tokens = [(7 * level + 5) % VOCAB, 11 + level]
                paths = [(*path, token) for path, token in zip(paths, tokens, strict=True)]
    assert runner.forwards == len(ROUNDS)
    return found


def gap(head: PublishedHead, *overrides: Any) -> float:
    """Return the largest difference from plain torch, relative to the largest logit."""
    reference = block_reference(MODEL, head, *overrides)
    worst = 0.0
    for row, known, path, logits in rounds(head):
        wanted = reference(TEXTS[row][: known + 1], path)
        same = wanted.isneginf() == logits.isneginf()
        assert same.all()
        largest = wanted[~wanted.isneginf()].abs().max()
        worst = max(worst, float((wanted - logits).nan_to_num().abs().max() / largest))
    return worst


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_three_rounds(name: str) -> None:
    assert gap(*HEADS[name]) < 1e-5


def test_a_wrong_reading_is_seen() -> None:
    """A wrong attention window or mask changes the logits, so the test above detects it."""
    head = sliding()
    assert gap(head, False, ((None, True), (None, False))) > 1e-3
    assert gap(head, False, ((WINDOW, False), (None, False))) > 1e-3


def test_what_a_block_stores_does_not_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockRunner._run

    def keeping(self: BlockRunner, roots: dict[int, int]) -> Tensor:
        outputs = original(self, roots)
        for row in roots:
            self._stored[row] += BLOCK
        return outputs

    monkeypatch.setattr(BlockRunner, "_run", keeping)
    assert gap(*HEADS["z-lab"]) > 1e-3


def test_prompts_are_read_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_runner, "CONTEXT_CHUNK", 4)
    assert gap(*HEADS["z-lab"]) < 1e-5


@pytest.mark.parametrize("name", ["z-lab", "DFlash 2"])
def test_steps_in_the_form_of_graphs(name: str) -> None:
    with padded_steps():
        assert gap(*HEADS[name]) < 1e-5


def test_a_row_begins_again() -> None:
    block = build_block_head(dflash(), MODEL)
    runner = BlockRunner(block, 1)
    parts = list(states_of(MODEL, TEXTS[0], LAYERS).split(32, dim=-1))
    with runner.active():
        logits = []
        for _ in range(2):
            assert not runner.knows(0)
            runner.learn({0: (0, 10)}, [part[:10] for part in parts])
            proposed = runner.propose({0: 5}, 4)
            logits.append(proposed.after(torch.tensor([5]), torch.tensor([0])))
            runner.learn({0: (10, 4)}, [part[10:14] for part in parts])
            runner.restart(0)
    assert torch.equal(*logits)
