"""Prompts for benchmarks: JSON lines with `id`, `task` and `turns`, or the user's own texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One prompt; `turns` are the user's messages, of which benchmarks use the first."""

    id: str
    task: str
    turns: tuple[str, ...]

    def encode(self, tokenizer: Any) -> Tensor:
        """(1, L) int64 ids, with the chat template if the tokenizer has one."""
        if tokenizer.chat_template is None:
            return torch.tensor([tokenizer(self.turns[0])["input_ids"]])
        message = [{"role": "user", "content": self.turns[0]}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return encoded["input_ids"]


def load_prompts(path: Path | None = None, per_task: int | None = None) -> list[Prompt]:
    """Read prompts, the first `per_task` of each task.

    Args:
        path: JSON lines with `turns` and optionally `id` and `task`; the 60 prompts of six tasks
            that come with the package by default.
        per_task: all of them by default.

    Raises:
        ValueError: if a line has no turns.
    """
    source = path or resources.files("hf_spec.bench") / "data" / "spec_prompts.jsonl"
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        if not row.get("turns"):
            raise ValueError(f"{source}, line {number + 1}: no turns")
        task = row.get("task", "text")
        seen[task] = seen.get(task, 0) + 1
        if per_task is None or seen[task] <= per_task:
            prompts.append(Prompt(str(row.get("id", number)), task, tuple(row["turns"])))
    return prompts
