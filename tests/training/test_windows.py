"""Window masking: the statistics that the definition gives on paper, and what is never replaced."""

from __future__ import annotations

import pytest
import torch

from hf_spec.training.windows import Windows, draw_windows, free_positions

LENGTH = 10_002


def drawn(window: int, seed: int = 0, share: float = 0.1) -> tuple[Windows, torch.Tensor]:
    free = free_positions(LENGTH, 1)
    windows = draw_windows(free, window, torch.Generator().manual_seed(seed), share)
    return windows, windows.slots(free)


def replaced_share(window: int, share: float = 0.1) -> float:
    """A position stays if none of the L positions up to it starts a window that reaches it.

    A start j places before reaches it with probability (L - j) / L. Starts are drawn without
    replacement, which for ten thousand positions is as good as apart from each other.
    """
    stays = 1.0
    for back in range(window):
        stays *= 1 - share * (window - back) / window
    return 1 - stays


@pytest.mark.parametrize("window", [1, 3, 5, 7])
def test_a_tenth_of_the_positions_start_a_window(window: int) -> None:
    windows, slots = drawn(window)
    assert len(windows.starts) == 1000
    assert windows.starts.unique().tolist() == windows.starts.tolist()
    assert (slots == 0).sum() == 1000


@pytest.mark.parametrize("window", [3, 5, 7])
def test_lengths_are_uniform(window: int) -> None:
    lengths = torch.cat([drawn(window, seed)[0].lengths for seed in range(20)])
    counts = torch.bincount(lengths, minlength=window + 1)
    assert counts[0] == 0
    expected = len(lengths) / window
    # Five standard deviations of a binomial count.
    bound = 5 * (expected * (1 - 1 / window)) ** 0.5
    assert (counts[1:] - expected).abs().max() < bound


@pytest.mark.parametrize(("window", "share"), [(3, 0.19), (5, 0.27), (7, 0.34)])
def test_share_of_replaced_tokens(window: int, share: float) -> None:
    """The shares that PAPERS.md measured, and the formula for them."""
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
    # Whatever the runs, slots count from a start and stay below L.
    assert int(slots.max()) == window - 1
    before, after = slots[:-1], slots[1:]
    inner = after > 0
    assert torch.equal(after[inner], before[inner] + 1)


def test_slots_count_from_the_newest_start() -> None:
    windows = Windows(torch.tensor([2, 4, 9]), torch.tensor([5, 1, 5]))
    free = free_positions(12, 1)
    assert windows.slots(free).tolist() == [-1, -1, 0, 1, 0, 1, 2, -1, -1, 0, 1, -1]


def test_a_window_ends_before_what_must_stay() -> None:
    windows = Windows(torch.tensor([2, 6]), torch.tensor([4, 1]))
    kept = [False] * 9
    kept[4] = True
    free = free_positions(9, 1, kept)
    assert windows.slots(free).tolist() == [-1, -1, 0, 1, -1, -1, 0, -1, -1]


@pytest.mark.parametrize(("length", "first"), [(20, 1), (20, 7), (20, 0), (3, 1), (2, 1), (9, 9)])
def test_prompt_first_and_last_token_stay(length: int, first: int) -> None:
    free = free_positions(length, first)
    expected = [max(first, 1) <= place < length - 1 for place in range(length)]
    assert free.tolist() == expected
    windows = draw_windows(free, 5, torch.Generator().manual_seed(0), share=1.0)
    assert torch.equal(windows.slots(free) >= 0, free)


def test_a_short_text_has_one_window() -> None:
    free = free_positions(5, 2)
    assert len(draw_windows(free, 3, torch.Generator().manual_seed(0)).starts) == 1
    none = draw_windows(free_positions(2, 1), 3, torch.Generator().manual_seed(0))
    assert len(none.starts) == 0


def test_a_seed_fixes_everything() -> None:
    assert torch.equal(drawn(5, 3)[1], drawn(5, 3)[1])
    assert not torch.equal(drawn(5, 3)[1], drawn(5, 4)[1])
