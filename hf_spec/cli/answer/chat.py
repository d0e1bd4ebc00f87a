"""`hf-spec chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from hf_spec.cli import options

LONGER = options.AnswerSettings(max_new_tokens=512)


@options.from_settings
def chat(
    *,
    model: options.ModelArgument,
    settings: options.AnswerSettings = LONGER,
    assistant: options.Assistants = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before the conversation.")
    ] = None,
    placement: options.Placement,
) -> None:
    """Talk with a model in the terminal.

    Answers appear as they are generated; accepted draft tokens are green, the target's own plain.
    Ctrl-C stops an answer, /help lists what else can be typed.

        hf-spec chat MODEL
        hf-spec chat MODEL --strategy falcon@HEAD --max-new-tokens 256
        hf-spec chat MODEL --assistant HEAD --assistant DRAFT --sample --temperature 0.7
    """
    from rich.console import Console

    from hf_spec.cli.answer.conversation import Conversation
    from hf_spec.cli.answer.speaker import Speaker

    speaker = Speaker.load(model, placement, settings, assistant)
    if importlib.util.find_spec("readline") is not None:
        # Its import lets input() edit lines and remember them.
        importlib.import_module("readline")
    Conversation(speaker, Console(highlight=False), system).run()
