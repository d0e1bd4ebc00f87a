"""`hf-spec generate`: generate from one prompt or from a file of prompts."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_spec.cli import options
from hf_spec.common.files import read_text

# Default of --batch-size.
BATCH_SIZE = 8


@options.from_settings
def generate(  # noqa: PLR0913 - one parameter per option
    *,
    model: options.ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="Prompt; - reads standard input.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(**options.FILE, help="Text file with the prompt.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            **options.FILE,
            help="JSON lines with turns and id (.jsonl), or text with one prompt per line. "
            "Processes of accelerate or torchrun share them.",
        ),
    ] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--raw",
            help="Apply the chat template, or continue the text. Default: apply it if any.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"Prompts per batch. Default: {BATCH_SIZE}.")
    ] = None,
    settings: options.AnswerSettings,
    assistant: options.Assistants = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON lines with the answers to --prompts; an interrupted run resumes."),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics to stderr.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, token ids and statistics.")
    ] = False,
    placement: options.Placement,
) -> None:
    """Continue or answer a prompt.

    The output is that of plain generate(); a strategy only changes the speed. In a terminal it is
    streamed, otherwise printed at the end.

        hf-spec generate MODEL "Why is the sky blue?" --stats
        hf-spec generate MODEL --prompt-file code.py --raw --strategy lookup
        git diff | hf-spec generate MODEL - --strategy falcon@HEAD --max-new-tokens 64
        hf-spec generate MODEL "A story." --do-sample --temperature 0.8 --seed 1 --json
        accelerate launch -m hf_spec generate MODEL --prompts in.jsonl --out out.jsonl
    """
    from hf_spec.cli.answer.console_streamer import ConsoleStreamer
    from hf_spec.cli.answer.legend import legend
    from hf_spec.cli.answer.responder import Responder

    load = partial(Responder.load, model, placement, settings, assistant)
    if prompts is not None or out is not None:
        if prompts is None or out is None or prompt is not None or prompt_file is not None:
            raise typer.BadParameter("--prompts needs --out and no other prompt")
        if as_json or stats:
            raise typer.BadParameter(
                "--json and --stats support only a single prompt; leave them out with --prompts"
            )
        from hf_spec.cli.answer.many import answer_all

        answer_all(load, prompts, out, batch_size or BATCH_SIZE, chat_template)
        return
    if batch_size is not None:
        raise typer.BadParameter("--batch-size needs --prompts and --out")
    text = _prompt(prompt, prompt_file)
    responder = load()
    ids = responder.encode_text(text, chat_template)
    console = Console(highlight=False)
    streams = console.is_terminal and not as_json
    streamer = ConsoleStreamer(responder.tokenizer, console) if streams else None
    output: Any = responder.generate(ids, streamer)
    new = output.sequences[0, ids.shape[1] :].tolist()
    answer = responder.tokenizer.decode(new, skip_special_tokens=True)
    if as_json:
        facts = {
            "model": model,
            "strategy": settings.strategy,
            "prompt_tokens": ids.shape[1],
            "text": answer,
            "token_ids": new,
            "stats": output.spec_stats.to_dict(),
        }
        typer.echo(json.dumps(facts))
    else:
        typer.echo("" if streams else answer)
    if stats:
        shown = f"{responder.entry.name}:\n{output.spec_stats}\n\n{legend(output.spec_stats)}"
        typer.echo(shown, err=True)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise typer.BadParameter("pass either a prompt (- for standard input) or --prompt-file")
    if file is not None:
        text = read_text(file)
    else:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
    if not text:
        raise typer.BadParameter("the prompt is empty")
    return text
