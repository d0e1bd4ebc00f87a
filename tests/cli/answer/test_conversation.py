"""A conversation with scripted input: history, commands, colors, and errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_spec import OptionError
from hf_spec.cli.answer.conversation import Conversation
from hf_spec.cli.answer.responder import Responder
from hf_spec.cli.options import AnswerSettings
from tests.cli.answer.conftest import make_tokenizer
from tests.cli.answer.test_console_streamer import green_words
from tests.tiny_models import build


class Talk:
    """Conversation with scripted input; `page` holds the output."""

    def __init__(self, responder: Responder, monkeypatch: pytest.MonkeyPatch):
        self.page = io.StringIO()
        console = Console(
            file=self.page, force_terminal=True, color_system="standard", width=100, highlight=False
        )
        self.conversation = Conversation(responder, console, system="w90")
        self._monkeypatch = monkeypatch

    def say(self, *lines: str) -> str:
        self._monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{x}\n" for x in lines)))
        before = self.page.tell()
        self.conversation.run()
        return self.page.getvalue()[before:]


@pytest.fixture
def talk(responder: Responder, monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(responder, monkeypatch)


def answer_to(text: str) -> str:
    """Return the answer of plain `generate()` to a rendered chat template."""
    ids = make_tokenizer()(text, return_tensors="pt")["input_ids"]
    output = build("llama").generate(ids, max_new_tokens=24, do_sample=False)
    return make_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_every_answer_knows_what_was_said(talk: Talk) -> None:
    talk.say("w11 w12", "", "w13")
    first = answer_to("system w90 user w11 w12 answer")
    second = answer_to(f"system w90 user w11 w12 assistant {first} user w13 answer")
    contents = [message["content"].strip() for message in talk.conversation.messages]
    assert contents == ["w90", "w11 w12", first, "w13", second]


def test_colors_and_statistics_agree(talk: Talk) -> None:
    page = talk.say("w11 w12 w13 w11 w12 w13", "w11 w12 w13", "/stats")
    answers, _, table = page.rpartition("last answer:")
    last, together = (part.split() for part in table.split("all:"))
    assert (last[:3], together[:3]) == (["new", "tokens", "24"], ["new", "tokens", "48"])
    accepted = int(together[together.index("accepted") + 1])
    assert accepted > 0
    assert green_words(answers) == accepted


def test_reset_forgets(talk: Talk) -> None:
    talk.say("w11", "/reset", "w12")
    contents = [message["content"].strip() for message in talk.conversation.messages]
    assert contents == ["w90", "w12", answer_to("system w90 user w12 answer")]
    assert "no answers yet" in talk.say("/reset", "/stats")


def test_save(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("old")
    page = talk.say("w11", f"/save {file}", "/save", f"/save {tmp_path}")
    assert json.loads(file.read_text()) == talk.conversation.messages
    assert page.count("needs a file name") == 2
    assert list(tmp_path.iterdir()) == [file]
    assert "error:" in talk.say(f"/save {tmp_path}/no/such/folder.json")
    assert "a device" in talk.say("/save /dev/full")


def test_a_name_below_a_home_that_is_unknown(talk: Talk) -> None:
    assert "error:" in talk.say("w11", "/save ~nobody-of-this-name/talk.json")


def test_another_strategy(talk: Talk) -> None:
    page = talk.say("/strategy none", "w11", "/strategy", "/strategy nonsense", "w12")
    assert "unknown spec_strategy 'nonsense'" in page
    assert talk.conversation.responder.entry.name == "none"
    # Without drafts no word is colored.
    assert green_words(page) == 0
    assert len(talk.conversation.messages) == 5


def test_help_exit_and_unknown_commands(talk: Talk) -> None:
    page = talk.say("/help", "/nonsense", "/exit", "w11")
    for name in ("/stats", "/reset", "/save", "/strategy", "/exit", "/help"):
        assert page.count(name) >= 2
    assert "unknown command /nonsense" in page
    assert len(talk.conversation.messages) == 1


def test_an_answer_that_cannot_be_given_is_not_remembered(talk: Talk) -> None:
    page = talk.say("w11 " * 300, "w12")
    assert "exceeds the model's context of 256" in " ".join(page.split())
    assert [m["content"].strip() for m in talk.conversation.messages][:2] == ["w90", "w12"]


def test_ctrl_c_cuts_an_answer_short(
    talk: Talk, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = 0

    def interrupt(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 4:
            raise KeyboardInterrupt

    handle = responder.model.register_forward_pre_hook(interrupt)
    try:
        page = talk.say("w11 w12")
    finally:
        handle.remove()
    assert "(stopped)" in page
    whole = answer_to("system w90 user w11 w12 answer")
    cut = talk.conversation.messages[-1]["content"]
    assert cut
    assert whole.startswith(cut.strip())
    assert len(cut) < len(whole)
    # The model still works.
    assert responder.generate(torch.arange(9, 15)[None]).sequences.shape[1] == 30


def test_no_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AnswerSettings("lookup", 4)
    responder = Responder(build("llama"), make_tokenizer(template=None), settings)
    with pytest.raises(OptionError, match="no chat template"):
        Talk(responder, monkeypatch).say("w11")
