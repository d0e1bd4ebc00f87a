"""Helpers that save a model and responses to disk and run commands on them."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from hf_spec.training.responses import FORMAT, Response
from tests.tiny_models import VOCAB, build, tokenizer


def save_model(folder: Path) -> Path:
    """Save the tiny Llama with a tokenizer, and return the folder."""
    build("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_responses(path: Path) -> Path:
    """Save eight responses of twelve tokens, half of them of task code."""
    generator = torch.Generator().manual_seed(0)
    lines = [json.dumps({"format": FORMAT})]
    for index in range(8):
        prompt = torch.randint(3, VOCAB, (1, 6), generator=generator)
        text = build("llama").generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
        task = "code" if index % 2 else "chat"
        lines.append(json.dumps(asdict(Response(f"p{index}", task, text[:6], text[6:]))))
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: Any) -> Any:
    """Run `hf-spec` with arguments of any type."""
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


def next_step(result: Any) -> list[str]:
    """Return the arguments of the suggested next command, without `hf-spec`."""
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stdout.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: "))
    assert words[0] == "hf-spec"
    return words[1:]


def short_bench(folder: Path) -> tuple[Any, ...]:
    """Return options for a benchmark of one prompt in the tiny model's alphabet."""
    prompts = folder / "prompts.txt"
    prompts.write_text("bacedabaceda\n")
    return ("--prompts", prompts, "--max-new-tokens", 3, "--repeats", 1, "--no-baselines")
