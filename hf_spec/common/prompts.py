"""Prompts: the benchmark set, files of the user, batches, and overlap between sets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.common.files import parse_json_lines, read_text

JSON_ENDINGS = (".jsonl", ".json")
# Task of a batch whose rows have different tasks.
MIXED = "mixed"
# Number of equal consecutive words that count as overlap (Brown et al. 2020, arXiv 2005.14165,
# appendix C). A shorter text counts as a whole.
OVERLAP_WORDS = 13


@dataclass(frozen=True)
class Prompt:
    """Prompt (`turns[0]`) and later messages, after pairs of message and answer (`history`)."""

    id: str
    task: str
    turns: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()

    def encode(self, tokenizer: Any) -> Tensor:
        """Return (1, L) int64 ids, with the chat template if the tokenizer has one."""
        if tokenizer.chat_template is None:
            return torch.tensor([tokenizer(self.turns[0])["input_ids"]])
        texts = [*(text for pair in self.history for text in pair), self.turns[0]]
        roles = cycle(("user", "assistant"))
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        return encode_chat(tokenizer, messages)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Tensor:
    """Return (1, L) int64 ids of a conversation in the chat template, with a generation prompt."""
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def load_prompts(
    path: Path | None = None,
    per_task: int | None = None,
    tasks: Sequence[str] = (),
    whole: bool = False,
) -> list[Prompt]:
    """Read prompts, optionally only of `tasks` and only the first `per_task` of each.

    A `.jsonl` or `.json` file has JSON lines with `turns` and optionally `id` and `task`. Any other
    file is text with a prompt per non-empty line, or with `whole` a single prompt. Default: the 60
    prompts of six tasks in this package.
    """
    source = path or resources.files("hf_spec.common") / "spec_prompts.jsonl"
    text = source.read_text(encoding="utf-8") if path is None else read_text(path)
    is_json = path is None or path.suffix in JSON_ENDINGS
    prompts = list(_from_json(str(source), text) if is_json else _from_text(text, whole))
    if not prompts:
        raise OptionError(f"{source} contains no prompts; add at least one")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise OptionError(f"{source}: two prompts have the same id; make them unique")
    all_tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    for task in tasks:
        if task not in all_tasks:
            raise OptionError(
                f"{source} has no prompts of task {task!r}; it has {', '.join(all_tasks)}"
            )
    counts: Counter[str] = Counter()
    selected = []
    for prompt in prompts:
        counts[prompt.task] += 1
        is_first = per_task is None or counts[prompt.task] <= per_task
        if is_first and prompt.task in (tasks or all_tasks):
            selected.append(prompt)
    return selected


def without_benchmark_overlap(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts that share no `OVERLAP_WORDS` words with those of this package.

    Training sets leave the others out, so that benchmarks stay held-out.
    """
    benchmark = {words for prompt in load_prompts() for words in _word_sequences(prompt)}
    return [prompt for prompt in prompts if benchmark.isdisjoint(_word_sequences(prompt))]


def _word_sequences(prompt: Prompt) -> Iterator[tuple[str, ...]]:
    for text in prompt.turns:
        words = tuple(re.findall(r"\w+", text.lower()))
        for begin in range(max(1, len(words) - OVERLAP_WORDS + 1)):
            yield words[begin : begin + OVERLAP_WORDS]


def _from_text(text: str, whole: bool) -> Iterator[Prompt]:
    for number, part in enumerate([text] if whole else text.split("\n")):
        if part.strip():
            yield Prompt(str(number), "text", (part.strip(),))


def _from_json(source: str, text: str) -> Iterator[Prompt]:
    for number, row in parse_json_lines(text, source):
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise OptionError(f"{source}, line {number}: `turns` must be a list of strings")
        yield Prompt(str(row.get("id", number - 1)), str(row.get("task", "text")), tuple(turns))


def as_conversations(
    prompts: Sequence[Prompt], tokenizer: Any, answer: Callable[[Prompt], str]
) -> list[Prompt]:
    """Return one prompt per turn, each with the turns and answers before it as history.

    The turns of a prompt with several get the ids "id/1", "id/2" and so on. `answer` returns the
    model's answer to the first turn of a prompt.
    """
    conversations: list[Prompt] = []
    for prompt in prompts:
        if len(prompt.turns) == 1:
            conversations.append(prompt)
            continue
        if tokenizer.chat_template is None:
            raise UnsupportedError(
                f"prompt {prompt.id!r} has {len(prompt.turns)} turns, but the tokenizer has no "
                "chat template; measure only the first turns"
            )
        for number, message in enumerate(prompt.turns, start=1):
            name, history = f"{prompt.id}/{number}", prompt.history
            if number > 1:
                earlier = conversations[-1]
                history = (*earlier.history, (earlier.turns[0], answer(earlier)))
            conversations.append(replace(prompt, id=name, turns=(message,), history=history))
    return conversations


def left_padded(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return left-padded `input_ids` and `attention_mask` of (L,) prompts."""
    masks = [torch.ones_like(row) for row in rows]
    return {
        name: pad_sequence(texts, batch_first=True, padding_side="left")
        for name, texts in (("input_ids", list(rows)), ("attention_mask", masks))
    }


@dataclass(frozen=True)
class Batch:
    """Prompts of one call: left-padded (B, L) int64 ids and mask."""

    prompts: tuple[Prompt, ...]
    ids: Tensor
    mask: Tensor

    @property
    def name(self) -> str:
        """Ids of the prompts, joined by "+"."""
        return "+".join(prompt.id for prompt in self.prompts)

    @property
    def task(self) -> str:
        """Task of the prompts, `MIXED` if they differ."""
        tasks = {prompt.task for prompt in self.prompts}
        return tasks.pop() if len(tasks) == 1 else MIXED


def check_batch_size(size: int, num_prompts: int) -> None:
    """Raise `OptionError` if a batch would contain a prompt twice."""
    if num_prompts < size:
        raise OptionError(
            f"a batch of {size} rows needs {size} prompts, but there are {num_prompts}; use more "
            "prompts or a smaller batch"
        )


def make_batches(prompts: Sequence[Prompt], tokenizer: Any, size: int) -> list[Batch]:
    """Return batches of prompts in order; the last is filled with the first prompts."""
    check_batch_size(size, len(prompts))
    batches = []
    for start in range(0, len(prompts), size):
        rows = [prompts[(start + row) % len(prompts)] for row in range(size)]
        padded = left_padded([prompt.encode(tokenizer)[0] for prompt in rows])
        batches.append(Batch(tuple(rows), padded["input_ids"], padded["attention_mask"]))
    return batches
