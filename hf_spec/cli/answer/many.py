"""Answers to a file of prompts, by any number of processes, each answer written once.

Every process answers its share of the prompts and appends to a file of its own beside the last one:

    OUT.0.part, OUT.1.part, ...     a line says how they were made, one is an answer
    OUT                             all answers in the order of the prompts, once all are there

A run that goes on reads what is in the parts, whatever number of processes wrote them. Whoever has
written the last answer joins the parts, so nobody waits for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from filelock import FileLock

from hf_spec.adapters.base_name import local_name
from hf_spec.cli.answer.speaker import Speaker
from hf_spec.cli.options import check_out
from hf_spec.data.prompts import Prompt, load_prompts
from hf_spec.errors import OptionError
from hf_spec.files import resume_lines, whole_lines, written_whole
from hf_spec.training.trainer import processes

FORMAT = "hf_spec.answers"


def answer_all(
    load: Callable[[], Speaker],
    source: Path,
    out: Path,
    batch_size: int,
    chat_template: bool | None,
) -> None:
    """Answer this process's share of the prompts in `source`, and write `out` if it is the last.

    Raises:
        OptionError: if `out` holds something else, or was begun with other settings.
        SpecError: as of `Speaker.load` and `Speaker.generate_each`.
    """
    check_out(out, source)
    prompts = load_prompts(source)
    several = next((prompt.id for prompt in prompts if len(prompt.turns) > 1), None)
    if several is not None:
        raise OptionError(f"{source}: prompt {several!r} has several turns; give one a line")
    if out.exists():
        _check_finished(out, prompts)
        return
    speaker = load()
    head = {
        "format": FORMAT,
        "model": local_name(speaker.model),
        "dtype": str(speaker.model.dtype).removeprefix("torch."),
        "chat_template": chat_template,
        **{name: value for name, value in asdict(speaker.settings).items() if name != "strategy"},
    }
    state = processes()
    known = {line["id"] for part in _parts(out) for line in whole_lines(part, head)}
    with state.split_between_processes(prompts) as share:
        todo = [prompt for prompt in share if prompt.id not in known]
    own = out.with_name(f"{out.name}.{state.process_index}.part")
    resume_lines(own, head)
    if speaker.settings.seed is not None:
        # Processes that draw alike would answer like prompts alike.
        torch.manual_seed(speaker.settings.seed + state.process_index)
    with own.open("a", encoding="utf-8") as file:
        for line in _answers(speaker, todo, batch_size, chat_template):
            file.write(json.dumps(line) + "\n")
            file.flush()
    typer.echo(f"process {state.process_index}: {len(todo)} of {len(prompts)} answers", err=True)
    _finish(out, prompts, head)


def _answers(
    speaker: Speaker, prompts: Sequence[Prompt], batch_size: int, chat_template: bool | None
) -> Iterable[dict[str, Any]]:
    ids = [speaker.encode_text(prompt.turns[0], chat_template) for prompt in prompts]
    for number, tokens in speaker.generate_each(ids, batch_size):
        yield {
            "id": prompts[number].id,
            "prompt_tokens": ids[number].shape[1],
            "text": speaker.tokenizer.decode(tokens, skip_special_tokens=True),
            "token_ids": tokens,
        }


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.*.part"))


def _finish(out: Path, prompts: Sequence[Prompt], head: dict[str, Any]) -> None:
    """Join the parts if no answer lacks."""
    lock = out.with_name(f"{out.name}.lock")
    with FileLock(lock):
        parts = _parts(out)
        answers = {line["id"]: line for part in parts for line in whole_lines(part, head)}
        if out.exists() or any(prompt.id not in answers for prompt in prompts):
            return
        with written_whole(out) as whole:
            lines = (json.dumps(answers[prompt.id]) + "\n" for prompt in prompts)
            whole.write_text("".join(lines), encoding="utf-8")
        # Whoever waits for the lock finds that all is done.
        for path in (*parts, lock):
            path.unlink(missing_ok=True)


def _check_finished(out: Path, prompts: Sequence[Prompt]) -> None:
    """Refuse a file that does not hold the answers to these prompts."""
    try:
        found = [json.loads(line)["id"] for line in out.read_text("utf-8").splitlines()]
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--out {out}: that is no file of answers; choose another") from error
    if found != [prompt.id for prompt in prompts]:
        raise OptionError(f"--out {out} holds the answers to other prompts; choose another file")
    typer.echo(f"{out} holds all answers already", err=True)
