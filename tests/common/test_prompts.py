"""The package's 60 prompts, user files, and conversion to token ids."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import OptionError, UnsupportedError
from hf_spec.common.prompts import (
    MIXED,
    OVERLAP_WORDS,
    Prompt,
    as_conversations,
    left_padded,
    load_prompts,
    make_batches,
    without_benchmark_overlap,
)

TEMPLATE = (
    "a {% for m in messages %}{{ 'word1' if m.role == 'assistant' }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}b{% endif %}"
)


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

    @pytest.mark.parametrize("row", [{"id": 1}, {"turns": []}, {"turns": "text"}, [1]])
    def test_a_line_without_turns(self, tmp_path: Path, row: Any) -> None:
        path = tmp_path / "own.jsonl"
        path.write_text(json.dumps({"turns": ["fine"]}) + "\n" + json.dumps(row))
        with pytest.raises(OptionError, match=r"own\.jsonl, line 2: `turns` must be a list"):
            load_prompts(path)

    @pytest.mark.parametrize("name", ["own.txt", "own.jsonl"])
    def test_a_file_of_another_encoding(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(OptionError, match="is not UTF-8 text"):
            load_prompts(path)

    def test_a_text_file_is_a_prompt_per_line_or_one(self, tmp_path: Path) -> None:
        path = tmp_path / "own.txt"
        path.write_text("one two\n\n {three}\n")
        lines = [Prompt("0", "text", ("one two",)), Prompt("2", "text", ("{three}",))]
        assert load_prompts(path) == lines
        assert load_prompts(path, whole=True) == [
            Prompt("0", "text", ("one two\n\n {three}",)),
        ]

    def test_only_a_newline_ends_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "own.jsonl"
        odd = "a\u2028b\x85c"
        path.write_text(f'\ufeff{{"turns": ["{odd}"]}}\r\n\n{{"turns": ["d"]}}\n', "utf-8")
        assert load_prompts(path) == [Prompt("0", "text", (odd,)), Prompt("2", "text", ("d",))]
        path = tmp_path / "own.txt"
        path.write_text(f"\ufeff{odd}\nd", "utf-8")
        assert load_prompts(path) == [Prompt("0", "text", (odd,)), Prompt("1", "text", ("d",))]

    def test_a_line_that_is_nested_too_deeply(self, tmp_path: Path) -> None:
        path = tmp_path / "own.jsonl"
        path.write_text('{"turns": ["fine"]}\n' + '{"turns": ' + "[" * 100_000)
        with pytest.raises(OptionError, match=r"own\.jsonl, line 2: nested too deeply"):
            load_prompts(path)

    def test_tasks_by_name(self) -> None:
        taken = load_prompts(per_task=2, tasks=["math", "code"])
        assert Counter(prompt.task for prompt in taken) == {"math": 2, "code": 2}
        with pytest.raises(OptionError, match=r"no prompts of task 'mth'; it has .*math"):
            load_prompts(tasks=["mth"])

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("own.txt", " \n", "contains no prompts"),
            ("own.jsonl", "", "contains no prompts"),
            ("own.jsonl", "one two", "line 1: not JSON"),
            ("own.jsonl", '{"id": 1, "turns": ["a"]}\n' * 2, "two prompts have the same id"),
        ],
    )
    def test_a_file_of_no_use(self, tmp_path: Path, name: str, text: str, message: str) -> None:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(OptionError, match=message):
            load_prompts(path)


class TestEncode:
    def test_the_first_turn_as_plain_text(self, tokenizer: Any) -> None:
        ids = Prompt("x", "t", ("one two one", "three")).encode(tokenizer)
        assert ids.dtype == torch.int64
        assert ids.tolist() == [tokenizer.convert_tokens_to_ids(["one", "two", "one"])]

    def test_the_chat_template_if_there_is_one(self, tokenizer: Any) -> None:
        tokenizer.chat_template = TEMPLATE
        ids = Prompt("x", "t", ("one two", "three")).encode(tokenizer)
        assert ids.tolist() == [tokenizer.convert_tokens_to_ids(["a", "one", "two", "b"])]


class TestConversations:
    def test_every_turn_follows_the_answers_before_it(self, tokenizer: Any) -> None:
        tokenizer.chat_template = TEMPLATE
        asked: list[str] = []

        def answer(prompt: Prompt) -> str:
            asked.append(prompt.id)
            return {"x/1": "two", "x/2": "three"}[prompt.id]

        prompts = [Prompt("x", "t", ("one", "c", "d")), Prompt("y", "t", ("the",))]
        turns = as_conversations(prompts, tokenizer, answer)
        assert [turn.id for turn in turns] == ["x/1", "x/2", "x/3", "y"]
        assert asked == ["x/1", "x/2"]
        assert turns[3] == prompts[1]
        words = ["a", "one", "word1", "two", "c", "word1", "three", "d", "b"]
        assert turns[2].encode(tokenizer).tolist() == [tokenizer.convert_tokens_to_ids(words)]

    def test_they_need_a_chat_template(self, tokenizer: Any) -> None:
        single = [Prompt("y", "t", ("the",))]
        assert as_conversations(single, tokenizer, str) == single
        with pytest.raises(UnsupportedError, match="'x' has 2 turns, but the tokenizer has no"):
            as_conversations([Prompt("x", "t", ("one", "two"))], tokenizer, str)


def test_left_padding() -> None:
    padded = left_padded([torch.tensor([4, 5, 6]), torch.tensor([7])])
    assert padded["input_ids"].tolist() == [[4, 5, 6], [0, 0, 7]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


class TestBatches:
    def test_prompts_in_order_and_the_last_batch_filled_up(
        self, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        third = Prompt("more-1", "letters", ("a b",))
        first, last = make_batches([*prompts, third], tokenizer, 2)
        assert (first.name, first.task) == ("count-1+letters-1", MIXED)
        assert first.ids.shape == (2, 7)
        assert first.mask.sum(dim=1).tolist() == [7, 6]
        assert first.ids[1, 1:].equal(prompts[1].encode(tokenizer)[0])
        assert (last.name, last.task) == ("more-1+count-1", MIXED)
        assert make_batches([third, prompts[1]], tokenizer, 2)[0].task == "letters"

    def test_more_rows_than_prompts(self, prompts: list[Prompt], tokenizer: Any) -> None:
        with pytest.raises(OptionError, match="a batch of 3 rows needs 3 prompts"):
            make_batches(prompts, tokenizer, 3)


def ids_without_overlap(*texts: str) -> list[str]:
    prompts = [Prompt(str(index), "qa", (text,)) for index, text in enumerate(texts)]
    return [prompt.id for prompt in without_benchmark_overlap(prompts)]


def test_none_of_the_package_is_left() -> None:
    assert without_benchmark_overlap(load_prompts()) == []


def test_a_run_of_words_is_enough() -> None:
    long = max((turn for prompt in load_prompts() for turn in prompt.turns), key=len)
    words = long.split()
    middle = words[40 : 40 + 2 * OVERLAP_WORDS]
    assert ids_without_overlap(
        f"Once upon a time: {' '.join(middle).upper()}! And so on.", "another one"
    ) == ["1"]
    # Shorter runs of words are too common to count.
    assert ids_without_overlap(" ".join(words[40:46])) == ["0"]


def test_short_prompts_count_whole() -> None:
    def length(text: str) -> int:
        return len(text.split())

    short = min((prompt.turns[0] for prompt in load_prompts()), key=length)
    assert length(short) < OVERLAP_WORDS
    assert ids_without_overlap(short.lower(), f"{short} Or not?", "...") == ["1", "2"]
