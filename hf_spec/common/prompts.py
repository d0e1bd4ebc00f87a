"""Prompts for benchmarks: JSON lines with `id`, `task` and `turns`, or the user's own texts."""

from __future__ import annotations

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
# The task of a batch whose rows have different ones.
MIXED = "mixed"


@dataclass(frozen=True)
class Prompt:
    """The user's messages `turns`, of which the first is answered, by what tables call them.

    `history` are pairs of a message and its answer that went before.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()

    def encode(self, tokenizer: Any) -> Tensor:
        """(1, L) int64 ids, with the chat template if the tokenizer has one."""
        if tokenizer.chat_template is None:
            return torch.tensor([tokenizer(self.turns[0])["input_ids"]])
        said = [*(text for pair in self.history for text in pair), self.turns[0]]
        roles = cycle(("user", "assistant"))
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
        ]
        return encode_chat(tokenizer, messages)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Tensor:
    """(1, L) int64: a conversation in the model's chat template, open for its answer."""
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
    """Read prompts, the first `per_task` of each task, or of those in `tasks`; by default all.

    A `.jsonl` or `.json` file has JSON lines with `turns` and optionally `id` and `task`, any other
    one text: a prompt per line that is not empty, or a `whole` one. By default they are the 60
    prompts of six tasks that come with the package.

    Raises:
        OptionError: if there are no prompts, or a line is none.
    """
    source = path or resources.files("hf_spec.common") / "spec_prompts.jsonl"
    text = source.read_text(encoding="utf-8") if path is None else read_text(path)
    is_json = path is None or path.suffix in JSON_ENDINGS
    found = list(_from_json(str(source), text) if is_json else _from_text(text, whole))
    if not found:
        raise OptionError(f"{source} holds no prompts")
    if len({prompt.id for prompt in found}) < len(found):
        raise OptionError(f"{source}: two prompts have the same id")
    known = dict.fromkeys(prompt.task for prompt in found)
    for task in tasks:
        if task not in known:
            raise OptionError(
                f"{source} has no prompts of task {task!r}; it has {', '.join(known)}"
            )
    seen: Counter[str] = Counter()
    taken = []
    for prompt in found:
        seen[prompt.task] += 1
        if (per_task is None or seen[prompt.task] <= per_task) and prompt.task in (tasks or known):
            taken.append(prompt)
    return taken


def _from_text(text: str, whole: bool) -> Iterator[Prompt]:
    for number, part in enumerate([text] if whole else text.split("\n")):
        if part.strip():
            yield Prompt(str(number), "text", (part.strip(),))


def _from_json(source: str, text: str) -> Iterator[Prompt]:
    for number, row in parse_json_lines(text, source):
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise OptionError(f"{source}, line {number}: no turns, a list of texts")
        yield Prompt(str(row.get("id", number - 1)), str(row.get("task", "text")), tuple(turns))


def as_conversations(
    prompts: Sequence[Prompt], tokenizer: Any, answer: Callable[[Prompt], str]
) -> list[Prompt]:
    """One prompt per turn in order, each with the turns and answers before it.

    Turns of prompts with several are called "id/1", "id/2" and so on. `answer` gives the model's
    answer to the first turn of a prompt.

    Raises:
        UnsupportedError: if a prompt has several turns and the tokenizer no chat template.
    """
    found: list[Prompt] = []
    for prompt in prompts:
        if len(prompt.turns) == 1:
            found.append(prompt)
            continue
        if tokenizer.chat_template is None:
            raise UnsupportedError(
                f"prompt {prompt.id!r} has {len(prompt.turns)} turns, and the tokenizer has no "
                "chat template to tell them apart; measure the first turns alone"
            )
        for number, message in enumerate(prompt.turns, start=1):
            name, history = f"{prompt.id}/{number}", prompt.history
            if number > 1:
                earlier = found[-1]
                history = (*earlier.history, (earlier.turns[0], answer(earlier)))
            found.append(replace(prompt, id=name, turns=(message,), history=history))
    return found


def left_padded(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of prompts (L,), padded on the left."""
    masks = [torch.ones_like(row) for row in rows]
    return {
        name: pad_sequence(texts, batch_first=True, padding_side="left")
        for name, texts in (("input_ids", list(rows)), ("attention_mask", masks))
    }


@dataclass(frozen=True)
class Batch:
    """Prompts generated from in one call: (B, L) int64 ids and mask, padded on the left."""

    prompts: tuple[Prompt, ...]
    ids: Tensor
    mask: Tensor

    @property
    def name(self) -> str:
        """The ids of its prompts."""
        return "+".join(prompt.id for prompt in self.prompts)

    @property
    def task(self) -> str:
        """The task of its prompts, if it is the same."""
        tasks = {prompt.task for prompt in self.prompts}
        return tasks.pop() if len(tasks) == 1 else MIXED


def check_batch_size(size: int, num_prompts: int) -> None:
    """Refuse batches that would hold the same prompt twice."""
    if num_prompts < size:
        raise OptionError(
            f"a batch of {size} rows needs as many prompts, and there are {num_prompts}; take "
            "more prompts or a smaller batch"
        )


def make_batches(prompts: Sequence[Prompt], tokenizer: Any, size: int) -> list[Batch]:
    """Batches of prompts in order; the last one is filled up from the beginning."""
    check_batch_size(size, len(prompts))
    batches = []
    for start in range(0, len(prompts), size):
        rows = [prompts[(start + row) % len(prompts)] for row in range(size)]
        padded = left_padded([prompt.encode(tokenizer)[0] for prompt in rows])
        batches.append(Batch(tuple(rows), padded["input_ids"], padded["attention_mask"]))
    return batches
