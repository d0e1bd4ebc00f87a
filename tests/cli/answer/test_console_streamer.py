"""Streamed text is complete, and its colored words match the statistics."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_spec.cli.answer.console_streamer import ConsoleStreamer, printable
from hf_spec.cli.answer.responder import Responder
from hf_spec.cli.options import AnswerSettings
from tests.cli.answer.conftest import PROMPT
from tests.tiny_models import build, settled_prompt

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def green_words(page: str) -> int:
    """Count words between the codes that switch the color on and off."""
    return sum(len(part.split(PLAIN)[0].split()) for part in page.split(GREEN)[1:])


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 6, 7, 30])
def test_colored_are_the_accepted_draft_tokens(responder: Responder, max_new_tokens: int) -> None:
    page = io.StringIO()
    console = Console(file=page, force_terminal=True, color_system="standard", width=40)
    streamer = ConsoleStreamer(responder.tokenizer, console, "green")
    responder.settings = AnswerSettings("lookup", max_new_tokens)
    # The model already repeats itself in this prompt, so drafts are accepted.
    ids = settled_prompt("llama")
    output: Any = responder.generate(ids, streamer)
    new = output.sequences[0, ids.shape[1] :]
    assert streamer.text.split() == responder.tokenizer.decode(new).split()
    accepted = output.spec_stats.accepted_tokens
    assert accepted > 0 or max_new_tokens == 1
    assert green_words(page.getvalue()) == accepted


def test_text_without_a_terminal_has_no_codes(responder: Responder) -> None:
    page = io.StringIO()
    streamer = ConsoleStreamer(responder.tokenizer, Console(file=page, width=20), "green")
    ids = responder.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = build("llama").generate(ids, max_new_tokens=24, do_sample=False)
    responder.generate(ids, streamer)
    assert page.getvalue() == responder.tokenizer.decode(expected[0, ids.shape[1] :])


def test_an_accepted_end_is_not_shown(responder: Responder) -> None:
    page = io.StringIO()
    console = Console(file=page, force_terminal=True, color_system="standard")
    streamer = ConsoleStreamer(responder.tokenizer, console, "green")
    # A round that ends with an accepted EOS token has no bonus token.
    streamer.put_row(0, [11, 12, responder.tokenizer.eos_token_id])
    streamer.end_row(0)
    assert green_words(page.getvalue()) == 2
    assert streamer.text.split() == ["w11", "w12"]


def test_a_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2J\x07b\tc\nd\r\x9b1me é 漢") == "a[2Jb\tc\nd1me é 漢"


def test_prompts_are_not_shown(responder: Responder) -> None:
    page = io.StringIO()
    ConsoleStreamer(responder.tokenizer, Console(file=page)).put(torch.tensor([[11, 12]]))
    assert page.getvalue() == ""
