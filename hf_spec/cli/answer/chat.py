"""`hf-spec chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from hf_spec.cli.method_options import (
    Assistants,
    MaxNewTokens,
    Sample,
    Sampling,
    Seed,
    Strategy,
    Temperature,
    TopP,
)
from hf_spec.cli.options import AUTO, Device, Dtype, ModelArgument


def chat(  # noqa: PLR0913 - one parameter an option
    model: ModelArgument,
    strategy: Strategy = "auto",
    assistant: Assistants = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before the conversation.")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    sample: Sample = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    dtype: Dtype = AUTO,
    device: Device = None,
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

    sampling = Sampling(sample, temperature, top_p, seed)
    chosen = {"max_new_tokens": max_new_tokens, "sampling": sampling}
    speaker = Speaker.load(model, dtype, device, strategy, assistant, **chosen)
    if importlib.util.find_spec("readline") is not None:
        # Its import lets input() edit lines and remember them.
        importlib.import_module("readline")
    Conversation(speaker, Console(highlight=False), system).run()
