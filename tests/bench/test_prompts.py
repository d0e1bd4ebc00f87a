"""The package's 60 prompts, the user's own, and how they become token ids."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec.bench.prompts import Prompt, load_prompts


class TestLoad:
    def test_the_package_brings_ten_prompts_of_six_tasks(self) -> None:
        prompts = load_prompts()
        assert set(Counter(prompt.task for prompt in prompts).values()) == {10}
        assert len({prompt.id for prompt in prompts}) == len(prompts) == 60
        assert all(
            prompt.turns and all(turn.strip() for turn in prompt.turns) for prompt in prompts
        )

    @pytest.mark.parametrize("per_task", [1, 2, 100])
    def test_per_task_takes_the_first_of_each(self, per_task: int) -> None:
        taken = load_prompts(per_task=per_task)
        assert set(Counter(prompt.task for prompt in taken).values()) == {min(per_task, 10)}
        assert [p for p in load_prompts() if p in taken] == taken

    def test_a_file_of_ones_own(self, tmp_path: Path) -> None:
        path = tmp_path / "own.jsonl"
        rows: list[dict[str, Any]] = [
            {"id": 7, "task": "count", "turns": ["uno", "due"], "source": "mine"},
            {"turns": ["è"]},
        ]
        path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), "utf-8")
        assert load_prompts(path) == [
            Prompt("7", "count", ("uno", "due")),
            Prompt("1", "text", ("è",)),
        ]

    @pytest.mark.parametrize("row", [{"id": 1}, {"turns": []}])
    def test_a_line_without_turns(self, tmp_path: Path, row: dict[str, Any]) -> None:
        path = tmp_path / "own.jsonl"
        path.write_text(json.dumps({"turns": ["fine"]}) + "\n" + json.dumps(row))
        with pytest.raises(ValueError, match=r"own\.jsonl, line 2: no turns"):
            load_prompts(path)


class TestEncode:
    def test_the_first_turn_as_plain_text(self, tokenizer: Any) -> None:
        ids = Prompt("x", "t", ("one two one", "three")).encode(tokenizer)
        assert ids.dtype == torch.int64
        assert ids.tolist() == [tokenizer.convert_tokens_to_ids(["one", "two", "one"])]

    def test_the_chat_template_if_there_is_one(self, tokenizer: Any) -> None:
        tokenizer.chat_template = (
            "a {% for m in messages %}{{ m.content }} {% endfor %}"
            "{% if add_generation_prompt %}b{% endif %}"
        )
        ids = Prompt("x", "t", ("one two", "three")).encode(tokenizer)
        assert ids.tolist() == [tokenizer.convert_tokens_to_ids(["a", "one", "two", "b"])]
