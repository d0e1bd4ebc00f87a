"""Resumable generation from a file of prompts with any number of processes.

Every process generates for its share of the prompts and appends to its own file:

    OUT.0.part, OUT.1.part, ...     first line: identification of the run; then one answer per line
    OUT                             all answers in the order of the prompts, at the end

An answer is matched with its prompt by a key of model, settings and prompt (`answer_keys`). So a
run resumes from the answers in all these files, with any number of processes and any order of
prompts. The process that writes the last answer joins the parts; no process waits for another.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from filelock import FileLock

from hf_spec.cli.answer.responder import Responder
from hf_spec.cli.options import check_out
from hf_spec.common.errors import OptionError
from hf_spec.common.files import (
    atomic_write,
    check_head,
    complete_lines,
    parse_json_lines,
    read_text,
    resume_lines,
)
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.training.responses import answer_keys, check_answered, model_facts
from hf_spec.training.trainer import processes

FORMAT = "hf_spec.answers"


def answer_all(
    load: Callable[[], Responder],
    source: Path,
    out: Path,
    batch_size: int,
    chat_template: bool | None,
) -> None:
    """Generate for this process's share of the prompts, and write `out` if all answers exist.

    Other contents of `out`, and answers of another model, settings or prompts, raise `OptionError`.
    """
    check_out(out, source)
    prompts = load_prompts(source)
    multi_turn = next((prompt.id for prompt in prompts if len(prompt.turns) > 1), None)
    if multi_turn is not None:
        raise OptionError(f"{source}: prompt {multi_turn!r} has several turns; use one per line")
    responder = load()
    run = _facts(responder, chat_template)
    ids = [responder.encode_text(prompt.turns[0], chat_template) for prompt in prompts]
    keys = answer_keys(run, (row[0].tolist() for row in ids))
    answered = _answered(out, run, keys)
    state = processes()
    with state.split_between_processes(list(range(len(prompts)))) as share:
        todo = [number for number in share if keys[number] not in answered]
    if responder.settings.seed is not None:
        # With equal seeds, processes would give equal answers to equal prompts.
        torch.manual_seed(responder.settings.seed + state.process_index)
    if todo:
        part = out.with_name(f"{out.name}.{state.process_index}.part")
        resume_lines(part, run)
        with part.open("a", encoding="utf-8") as file:
            for index, tokens in responder.generate_each([ids[n] for n in todo], batch_size):
                number = todo[index]
                answer = {
                    "id": prompts[number].id,
                    "key": keys[number],
                    "prompt_tokens": ids[number].shape[1],
                    "text": responder.tokenizer.decode(tokens, skip_special_tokens=True),
                    "token_ids": tokens,
                }
                file.write(json.dumps(answer) + "\n")
                file.flush()
    if out.exists() and answered.keys() == set(keys):
        typer.echo(f"{out} has all answers already", err=True)
    else:
        counts = f"{len(todo)} of {len(prompts)}"
        typer.echo(f"process {state.process_index}: {counts} answers", err=True)
    _finish(out, prompts, run, keys)


def _facts(responder: Responder, chat_template: bool | None) -> dict[str, Any]:
    """Return what answers depend on besides their prompts, as JSON values.

    A lossless strategy is left out, because it does not change the answers.
    """
    settings = asdict(responder.settings)
    if not getattr(responder.entry.config, "lossy", False):
        del settings["strategy"]
    facts = model_facts(responder.model)
    return {"format": FORMAT, **facts, "chat_template": chat_template, **settings}


def _parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{glob.escape(out.name)}.*.part"))


def _finished(out: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers in `out`; empty if it does not exist."""
    if not out.exists():
        return []
    try:
        rows = [row for _, row in parse_json_lines(read_text(out), out)]
        runs = [row["run"] for row in rows]
        [row["key"] for row in rows]
    except (OptionError, KeyError, TypeError) as error:
        raise OptionError(f"--out {out}: not a file of answers; choose another") from error
    for stored in runs:
        check_head(out, stored, run)
    return rows


def _answered(out: Path, run: dict[str, Any], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the answers of all processes and earlier runs by key."""
    files = {out: _finished(out, run), **{part: complete_lines(part, run) for part in _parts(out)}}
    answers = {}
    for path, rows in files.items():
        check_answered(path, (row.get("key") for row in rows), keys)
        answers.update({row["key"]: row for row in rows})
    return answers


def _finish(out: Path, prompts: Sequence[Prompt], run: dict[str, Any], keys: Sequence[str]) -> None:
    """Join the parts if all answers exist."""
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
            with atomic_write(out) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        # Processes that wait for the lock find the complete file.
        for path in (*parts, lock):
            path.unlink(missing_ok=True)
