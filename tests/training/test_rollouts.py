"""Recorded texts: tokens and states over several rounds, within a limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hf_spec.training.rollouts import RolloutRecorder


def states(first: int, count: int) -> Any:
    """Return a round output where token n has the states n of layer 1 and -n of layer -1."""
    numbers = torch.arange(first, first + count, dtype=torch.float32)[:, None]
    return SimpleNamespace(hidden={1: numbers, -1: -numbers})


def recorder(max_tokens: int = 100) -> RolloutRecorder:
    return RolloutRecorder((1, -1), max_tokens)


def test_states_of_all_rounds_are_joined() -> None:
    kept, first, second = recorder(), [7, 8, 9, 10], [5, 6]
    kept.record([first, second], [1, 1], {0: [0, 1, 2], 1: [4]}, states(0, 5))
    first += [11, 12]
    # There is a rejected node between the accepted ones.
    kept.record([first, second], [3, 1], {0: [0, 2]}, states(10, 3))
    one, other = kept.take()
    assert (one.response.prompt, one.response.response) == ([7, 8, 9], [10, 11, 12])
    assert one.features is not None
    assert one.features.dtype == torch.bfloat16
    assert one.features.tolist() == [[n, -n] for n in (0, 1, 2, 10, 12)]
    assert (other.response.prompt, other.response.response) == ([5], [6])
    assert other.features is not None
    assert other.features.tolist() == [[4, -4]]
    assert kept.take() == []


def test_tokens_after_a_stop_are_left_out() -> None:
    kept, tokens = recorder(), [7, 8]
    kept.record([tokens], [1], {0: [0, 1, 2, 3]}, states(0, 4))
    (text,) = kept.take()
    assert text.features is not None
    assert text.features.tolist() == [[0, 0]]


def test_prompts_alone_teach_nothing() -> None:
    kept = recorder()
    kept.record([[7, 8]], [0], {0: [0, 1]}, states(0, 2))
    assert kept.take() == []


def test_texts_are_recorded_from_their_beginning_or_not_at_all() -> None:
    kept, tokens = recorder(), [1, 2, 3, 4]
    kept.record([tokens], [2], {0: [0, 1]}, states(0, 2))
    assert kept.take() == []


def test_another_text_in_the_same_row_is_another_text() -> None:
    kept = recorder()
    for prompt in ([1, 2], [3, 4]):
        kept.record([[*prompt, 5]], [1], {0: [0, 1]}, states(0, 2))
    assert [text.response.prompt for text in kept.take()] == [[1, 2], [3, 4]]


def test_the_oldest_texts_are_dropped() -> None:
    kept, texts = recorder(max_tokens=5), [[n, n, n] for n in range(4)]
    for tokens in texts:
        kept.record([tokens], [1], {0: [0, 1]}, states(0, 2))
    assert [text.response.prompt for text in kept.take()] == [[2, 2], [3, 3]]
    # The latest text is kept regardless of its length.
    kept.record([list(range(9))], [1], {0: list(range(8))}, states(0, 8))
    assert len(kept.take()) == 1
