"""`hf-spec chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from hf_spec.cli import options

CHAT_DEFAULTS = options.AnswerSettings(max_new_tokens=512)


@options.from_settings
def chat(
    *,
    model: options.ModelArgument,
    settings: options.AnswerSettings = CHAT_DEFAULTS,
    assistant: options.Assistants = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    placement: options.Placement,
) -> None:
    """Chat with a model in the terminal.

    Answers are streamed; accepted draft tokens are green. Ctrl-C stops an answer, /help lists the
    commands.

        hf-spec chat MODEL
        hf-spec chat MODEL --strategy falcon@HEAD --max-new-tokens 256
        hf-spec chat MODEL --assistant HEAD --assistant DRAFT --do-sample --temperature 0.7
    """
    from rich.console import Console

    from hf_spec.cli.answer.conversation import Conversation
    from hf_spec.cli.answer.responder import Responder

    responder = Responder.load(model, placement, settings, assistant)
    if importlib.util.find_spec("readline") is not None:
        # Importing it adds line editing and history to input().
        importlib.import_module("readline")
    Conversation(responder, Console(highlight=False), system).run()
