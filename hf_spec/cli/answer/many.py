"""Answers to a file of prompts, by any number of processes, each answer written once.

Every process answers its share of the prompts and appends to a file of its own beside the last one:

    OUT.0.part, OUT.1.part, ...     the first line identifies the run, every other one is an answer
    OUT                             all answers in the order of the prompts, once there are all

An answer is matched with its prompt by a key of model, settings and prompt (`answer_keys`), so a
run resumes from the answers in all these files, whatever number of processes wrote them and in
whatever order the prompts are now. The process that writes the last answer joins the parts, so no
process waits for another.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from filelock import FileLock
from torch import Tensor

from hf_spec.cli.answer.speaker import Speaker
from hf_spec.cli.options import check_out
from hf_spec.common.errors import OptionError
from hf_spec.common.files import (
    check_head,
    parse_json_lines,
    read_text,
    resume_lines,
    whole_lines,
    written_whole,
)
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.training.answer_keys import answer_keys, check_answered, model_facts
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
        OptionError: if `out` holds something else, or answers of another model, of other settings
            or to other prompts.
        SpecError: as of `Speaker.load` and `Speaker.generate_each`.
    """
    check_out(out, source)
    prompts = load_prompts(source)
    several = next((prompt.id for prompt in prompts if len(prompt.turns) > 1), None)
    if several is not None:
        raise OptionError(f"{source}: prompt {several!r} has several turns; give one a line")
    speaker = load()
    run = _facts(speaker, chat_template)
    ids = [speaker.encode_text(prompt.turns[0], chat_template) for prompt in prompts]
    keys = answer_keys(run, (row[0].tolist() for row in ids))
    answered = _answered(out, run, keys)
    state = processes()
    with state.split_between_processes(list(range(len(prompts)))) as share:
        todo = [number for number in share if keys[number] not in answered]
    if speaker.settings.seed is not None:
        # Processes that draw alike would answer like prompts alike.
        torch.manual_seed(speaker.settings.seed + state.process_index)
    if todo:
        own = out.with_name(f"{out.name}.{state.process_index}.part")
        resume_lines(own, run)
        with own.open("a", encoding="utf-8") as file:
            for place, line in _answers(speaker, [ids[number] for number in todo], batch_size):
                known_by = {"id": prompts[todo[place]].id, "key": keys[todo[place]]}
                file.write(json.dumps({**known_by, **line}) + "\n")
                file.flush()
    if out.exists() and answered.keys() == set(keys):
        typer.echo(f"{out} holds all answers already", err=True)
    else:
        counts = f"{len(todo)} of {len(prompts)}"
        typer.echo(f"process {state.process_index}: {counts} answers", err=True)
    _finish(out, prompts, run, keys)


def _facts(speaker: Speaker, chat_template: bool | None) -> dict[str, Any]:
    """Return what answers depend on besides their prompts, as JSON values.

    The strategy is left out: it changes how fast the same answers come, unless it is lossy.
    """
    settings = asdict(speaker.settings)
    if not getattr(speaker.entry.config, "lossy", False):
        del settings["strategy"]
    return {
        "format": FORMAT,
        **model_facts(speaker.model),
        "chat_template": chat_template,
        **settings,
    }


def _answers(
    speaker: Speaker, prompts: Sequence[Tensor], batch_size: int
) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, tokens in speaker.generate_each(prompts, batch_size):
        yield (
            number,
            {
                "prompt_tokens": prompts[number].shape[1],
                "text": speaker.tokenizer.decode(tokens, skip_special_tokens=True),
                "token_ids": tokens,
            },
        )


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{glob.escape(out.name)}.*.part"))


def _finished(out: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers in `out`, none if it does not exist."""
    if not out.exists():
        return []
    try:
        rows = [row for _, row in parse_json_lines(read_text(out), out)]
        runs = [row["run"] for row in rows]
        [row["key"] for row in rows]
    except (OptionError, KeyError, TypeError) as error:
        raise OptionError(f"--out {out}: not a file of answers; choose another") from error
    for found in runs:
        check_head(out, found, run)
    return rows


def _answered(out: Path, run: dict[str, Any], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the answers that earlier and other processes have written, by key."""
    files = {out: _finished(out, run), **{part: whole_lines(part, run) for part in _parts(out)}}
    answers = {}
    for path, rows in files.items():
        check_answered(path, (row.get("key") for row in rows), keys)
        answers.update({row["key"]: row for row in rows})
    return answers


def _finish(out: Path, prompts: Sequence[Prompt], run: dict[str, Any], keys: Sequence[str]) -> None:
    """Join the parts if no answer is missing."""
    lock = out.with_name(f"{out.name}.lock")
    with FileLock(lock):
        parts, answers = _parts(out), _answered(out, run, keys)
        if answers.keys() != set(keys):
            return
        rows = [
            {**answers[key], "id": prompt.id, "run": run}
            for key, prompt in zip(keys, prompts, strict=True)
        ]
        if rows != _finished(out, run):
            with written_whole(out) as whole:
                whole.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        # Whoever waits for the lock finds that all is done.
        for path in (*parts, lock):
            path.unlink(missing_ok=True)
