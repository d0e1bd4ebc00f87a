"""Adaptive chains that run at once equal chains run one by one; positions of windows."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec.methods.sdsat.adaptive_tokens import from_adapter
from hf_spec.methods.sdsat.training_chains import (
    Text,
    agreement,
    draw_windows,
    run_chains,
    slots_of,
    window_length,
)
from tests.tiny_models import build, random_adaptive_tokens, repetitive_prompt


class TestRunChains:
    @pytest.mark.parametrize("mode", ["gated", "embeddings"])
    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_sliding", "bloom"])
    @torch.no_grad()
    def test_they_say_what_a_forward_for_each_prefix_says(self, name: str, mode: str) -> None:
        model = build(name)
        tokens = from_adapter(model, random_adaptive_tokens(model, mode, diverse=True))
        texts = [
            Text(repetitive_prompt(seed=1)[0].tolist(), 6),
            Text(repetitive_prompt(length=13, seed=2)[0].tolist(), 1),
        ]
        chains = [[(6, 3), (9, 1), (19, 1)], [(1, 2), (5, 3)]]
        logits, positions = run_chains(model, tokens, texts, chains)
        assert positions == [
            (row, start + slot)
            for row, mine in enumerate(chains)
            for start, length in mine
            for slot in range(length)
        ]
        found = iter(logits)
        for text, mine in zip(texts, chains, strict=True):
            for start, length in mine:
                ids = torch.tensor([[*text.tokens[:start], *tokens.chain(length)]])
                with tokens.active(model), tokens.embedded(model, ids) as embeddings:
                    expected = model(inputs_embeds=embeddings).logits[0, start:]
                for line in expected:
                    torch.testing.assert_close(next(found), line, atol=3e-4, rtol=1e-4)


class TestAgreement:
    def test_it_counts_what_plain_forwards_say(self, model: PreTrainedModel) -> None:
        tokens = from_adapter(model, random_adaptive_tokens(model, "embeddings"))
        text = Text(repetitive_prompt()[0].tolist(), 15)
        # Positions 15 to 19 are free, so chains of 3 are 3, 3, 3, 2 and 1 long.
        right = []
        with torch.no_grad():
            for start, length in ((15, 3), (16, 3), (17, 3), (18, 2), (19, 1)):
                ids = torch.tensor([[*text.tokens[:start], *[-1] * length]])
                with tokens.embedded(model, ids) as embeddings:
                    choice = model(inputs_embeds=embeddings).logits[0, start:].argmax(dim=-1)
                right.append((choice == torch.tensor(text.tokens[start + 1 :][:length])).tolist())
        figures = agreement(model, tokens, [text], 3, 5)
        for slot in range(3):
            seen = [row[slot] for row in right if len(row) > slot]
            assert figures[f"slot_{slot + 1}"] == pytest.approx(sum(seen) / len(seen))
        runs = [row.index(False) if False in row else len(row) for row in right]
        assert figures["accepted"] == pytest.approx(sum(runs) / 5)
        assert figures["tokens_per_forward"] == 1 + figures["accepted"] / 2


LENGTH = 10_002


def free_positions(length: int, first: int) -> torch.Tensor:
    return Text([5] * length, first).free()


def drawn(window: int, seed: int = 0, share: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (W, 2) starts and lengths of windows, and the slots of all positions."""
    free = free_positions(LENGTH, 1)
    windows = draw_windows(free, window, torch.Generator().manual_seed(seed), share)
    return torch.tensor(windows), slots_of(windows, LENGTH)


def replaced_share(window: int, share: float = 0.1) -> float:
    """Return the expected share of replaced positions.

    A position stays if none of the L positions up to it starts a window that reaches it. A start j
    positions before reaches it with probability (L - j) / L. Starts are drawn without replacement;
    among 10,000 positions they are nearly independent.
    """
    stays = 1.0
    for back in range(window):
        stays *= 1 - share * (window - back) / window
    return 1 - stays


@pytest.mark.parametrize("window", [1, 3, 5, 7])
def test_a_tenth_of_the_positions_start_a_window(window: int) -> None:
    windows, slots = drawn(window)
    assert len(windows) == 1000
    assert windows[:, 0].unique().tolist() == windows[:, 0].tolist()
    assert (slots == 0).sum() == 1000


@pytest.mark.parametrize("window", [3, 5, 7])
def test_lengths_are_uniform(window: int) -> None:
    lengths = torch.cat([drawn(window, seed)[0][:, 1] for seed in range(20)])
    counts = torch.bincount(lengths, minlength=window + 1)
    assert counts[0] == 0
    expected = len(lengths) / window
    # Five standard deviations of a binomial count.
    bound = 5 * (expected * (1 - 1 / window)) ** 0.5
    assert (counts[1:] - expected).abs().max() < bound


@pytest.mark.parametrize(("window", "share"), [(3, 0.19), (5, 0.27), (7, 0.34)])
def test_share_of_replaced_tokens(window: int, share: float) -> None:
    """Measured shares match the formula and known values."""
    found = [float((drawn(window, seed)[1] >= 0).float().mean()) for seed in range(10)]
    mean = sum(found) / len(found)
    assert mean == pytest.approx(replaced_share(window), abs=0.004)
    assert mean == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("window", [3, 5])
def test_windows_meet_and_runs_grow_longer_than_one(window: int) -> None:
    slots = torch.cat([drawn(window, seed)[1] for seed in range(10)])
    run, runs = 0, []
    for slot in slots.tolist():
        if slot >= 0:
            run += 1
        elif run:
            runs.append(run)
            run = 0
    assert max(runs) > window
    # In runs of any length, slots count from the newest start and stay below L.
    assert int(slots.max()) == window - 1
    before, after = slots[:-1], slots[1:]
    inner = after > 0
    assert torch.equal(after[inner], before[inner] + 1)


def test_slots_count_from_the_newest_start() -> None:
    slots = slots_of([(2, 5), (4, 1), (9, 2)], 12)
    assert slots.tolist() == [-1, -1, 0, 1, 0, 1, 2, -1, -1, 0, 1, -1]


def test_a_window_ends_before_what_must_stay() -> None:
    free = Text([5, 5, 5, 5, 9, 5, 5, 5, 5], 1, frozenset({9})).free()
    windows = draw_windows(free, 4, torch.Generator().manual_seed(0), share=1.0)
    assert (3, 1) in windows
    assert slots_of(windows, len(free))[4] == -1
    assert [window_length(free, start, 4) for start in (2, 5)] == [2, 3]


@pytest.mark.parametrize(("length", "first"), [(20, 1), (20, 7), (20, 0), (3, 1), (2, 1), (9, 9)])
def test_prompt_first_and_last_token_stay(length: int, first: int) -> None:
    free = free_positions(length, first)
    expected = [max(first, 1) <= position < length - 1 for position in range(length)]
    assert free.tolist() == expected
    windows = draw_windows(free, 5, torch.Generator().manual_seed(0), share=1.0)
    assert torch.equal(slots_of(windows, length) >= 0, free)


def test_a_short_text_has_one_window() -> None:
    free = free_positions(5, 2)
    assert len(draw_windows(free, 3, torch.Generator().manual_seed(0), 0.1)) == 1
    assert draw_windows(free_positions(2, 1), 3, torch.Generator().manual_seed(0), 0.1) == []


def test_a_seed_fixes_everything() -> None:
    assert torch.equal(drawn(5, 3)[1], drawn(5, 3)[1])
    assert not torch.equal(drawn(5, 3)[1], drawn(5, 4)[1])
