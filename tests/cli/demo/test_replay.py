"""Recordings of real generations, and replays on an in-memory terminal with a fake clock."""

from __future__ import annotations

import io
import time

import pytest
import torch
from rich.console import Console

from hf_spec.cli.demo.replay import Lane, Piece, Recorder, Recording, replay
from hf_spec.evaluation.bench import contenders
from hf_spec.evaluation.bench.contenders import Run
from hf_spec.evaluation.bench.runner import Record
from hf_spec.methods.entries import parse_entry
from tests import tiny_models

NEW_TOKENS = 12

SLOW = Lane("plain", [Piece(1.0, "one ", False), Piece(4.0, "two", False)], 2, 4.0)
FAST = Lane("lookup", [Piece(1.0, "one ", True), Piece(1.0, "two", False)], 2, 1.0)


class Clock:
    """Clock that advances only in `sleep()`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")


def test_text_appears_when_it_came() -> None:
    assert [SLOW.text(seconds).plain for seconds in (0.5, 1.0, 4.0)] == ["", "one ", "one two"]
    assert FAST.text(1.0).plain == "one two"


def test_only_accepted_drafts_have_a_style() -> None:
    [span] = FAST.text(1.0).spans
    assert FAST.text(1.0).plain[span.start : span.end] == "one "


def test_the_speed_stands_there_once_it_is_known() -> None:
    assert SLOW.clock(3.96) == "4.0 s"
    assert SLOW.clock(4.0) == "4.0 s, 0 tokens/s"
    assert FAST.clock(9.0) == "1.0 s, 2 tokens/s"


def test_replay_takes_as_long_as_the_slowest(terminal: Console) -> None:
    clock = Clock()
    replay(terminal, [SLOW, FAST], clock, clock.sleep)
    assert clock.now - 100.0 == pytest.approx(4.0, abs=0.1)


def test_the_fast_text_is_whole_while_the_slow_one_is_not(terminal: Console) -> None:
    clock = Clock()
    replay(terminal, [SLOW, FAST], clock, clock.sleep)
    frames = terminal.file.getvalue().split("plain")  # type: ignore[attr-defined]
    [middle, *_] = [frame for frame in frames if "2.0 s" in frame]
    assert middle.count("two") == 1
    assert frames[-1].count("two") == 2
    assert "0 tokens/s" in frames[-1]


def test_control_characters_and_markup_of_a_model_are_not_obeyed(terminal: Console) -> None:
    lane = Lane("[red]x", [Piece(0.0, "\x1b[2J[bold]y", False)], 1, 0.1)
    clock = Clock()
    replay(terminal, [lane, lane], clock, clock.sleep)
    page = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in page
    assert "[red]x" in page
    assert "[bold]y" in page


def recorded(strategy: str | None) -> tuple[Run, Recording, torch.Tensor]:
    model = tiny_models.build("llama")
    ids = tiny_models.settled_prompt("llama")
    recorder = Recorder()
    settings = {"do_sample": False, "streamer": recorder}
    if strategy is None:
        contender = contenders.plain(model, settings)
    else:
        contender = contenders.strategy(model, parse_entry(strategy).config, settings=settings)
    run = contender.run(ids, NEW_TOKENS)
    [recording] = recorder.recordings
    return run, recording, ids[0]


def test_plain_tokens_come_one_by_one() -> None:
    run, recording, prompt = recorded(None)
    assert recording.prompt_ids == prompt.tolist()
    assert recording.token_ids == run.sequence[len(prompt) :].tolist()
    assert [len(block) for _, block in recording.blocks] == [1] * NEW_TOKENS


def test_blocks_of_a_speculative_run_are_its_rounds() -> None:
    run, recording, prompt = recorded("lookup")
    assert run.stats is not None
    assert recording.token_ids == run.sequence[len(prompt) :].tolist()
    accepted = sum(len(block) - 1 for _, block in recording.blocks)
    assert accepted == run.stats.accepted_tokens > 0


def test_times_rise_and_stay_within_the_call() -> None:
    start = time.perf_counter()
    _, recording, _ = recorded("lookup")
    times = [0.0, *(seconds for seconds, _ in recording.blocks), time.perf_counter() - start]
    assert times == sorted(times)
    assert times[1] > 0


def test_every_run_is_a_recording_of_its_own() -> None:
    recorder = Recorder()
    for prompt in ([[1, 2]], [[3, 4]]):
        recorder.put(torch.tensor(prompt))
        recorder.put(torch.tensor([7, 8]))
        recorder.end()
    assert [found.prompt_ids for found in recorder.recordings] == [[1, 2], [3, 4]]
    assert [found.token_ids for found in recorder.recordings] == [[7, 8]] * 2


def test_a_lane_is_the_text_with_drafts_told_from_the_rest() -> None:
    tokenizer = tiny_models.tokenizer()
    record = Record("p", "t", "lookup", 0, 3.0, 4.0, 4, 2, True)
    lane = Recording([1], [(1.0, [2, 3, 4]), (2.0, [5])]).lane(record, tokenizer)
    assert (lane.title, lane.num_tokens, lane.seconds) == ("lookup", 4, 3.0)
    assert lane.text(3.0).plain == tokenizer.decode([2, 3, 4, 5])
    assert [(piece.seconds, piece.drafted) for piece in lane.pieces] == [
        (1.0, True),
        (1.0, False),
        (2.0, False),
    ]
