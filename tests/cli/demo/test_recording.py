"""Recordings of real generations: every token, in order, with its time."""

from __future__ import annotations

import torch

from hf_spec.bench import contenders
from hf_spec.bench.contenders import Contender, Run, parse_entry
from hf_spec.cli.demo.recording import Block, Recorder, Recording
from tests import tiny_models

NEW_TOKENS = 12


def recorded(strategy: str | None) -> tuple[Run, Recording, torch.Tensor]:
    model = tiny_models.build("llama")
    ids = tiny_models.settled_prompt("llama")
    recorder = Recorder()
    settings = {"do_sample": False, "streamer": recorder}
    if strategy is None:
        contender = contenders.plain(model, settings)
    else:
        contender = contenders.strategy(model, parse_entry(strategy)[1], settings=settings)
    run = recorder.watch(contender).run(ids, NEW_TOKENS)
    return run, recorder.latest[contender.name], ids[0]


def test_plain_tokens_come_one_by_one() -> None:
    run, recording, prompt = recorded(None)
    assert recording.prompt_ids == prompt.tolist()
    assert recording.token_ids == run.sequence[len(prompt) :].tolist()
    assert [len(block.token_ids) for block in recording.blocks] == [1] * NEW_TOKENS


def test_blocks_of_a_speculative_run_are_its_rounds() -> None:
    run, recording, prompt = recorded("lookup")
    assert run.stats is not None
    assert recording.token_ids == run.sequence[len(prompt) :].tolist()
    accepted = sum(len(block.token_ids) - 1 for block in recording.blocks)
    assert accepted == run.stats.accepted_tokens > 0


def test_times_rise_and_stay_within_the_call() -> None:
    _, recording, _ = recorded("lookup")
    times = [0.0, *(block.seconds for block in recording.blocks), recording.seconds]
    assert times == sorted(times)
    assert times[1] > 0


def test_the_next_run_replaces_the_recording() -> None:
    recorder = Recorder()

    def generate(ids: torch.Tensor, new_tokens: int, mask: torch.Tensor | None = None) -> Run:
        recorder.put(ids)
        recorder.put(torch.tensor([7, 8]))
        return Run(ids)

    contender = recorder.watch(Contender("one", generate))
    for prompt in ([[1, 2]], [[3, 4]]):
        contender.run(torch.tensor(prompt), 2)
        assert recorder.latest["one"].prompt_ids == prompt[0]
        assert recorder.latest["one"].token_ids == [7, 8]


def test_pieces_are_the_text_with_drafts_told_from_the_rest() -> None:
    tokenizer = tiny_models.tokenizer()
    recording = Recording(3.0, [1], [Block(1.0, [2, 3, 4]), Block(2.0, [5])])
    pieces = recording.pieces(tokenizer)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode([2, 3, 4, 5])
    assert [(piece.seconds, piece.drafted) for piece in pieces] == [
        (1.0, True),
        (1.0, False),
        (2.0, False),
    ]
