"""Answers of the target: equal to plain `generate()`, written once, resumed if interrupted."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_spec import OptionError
from hf_spec.common.prompts import Prompt
from hf_spec.training.responses import (
    Response,
    answer_keys,
    answer_vocabulary,
    check_answered,
    end_tokens,
    frequent_tokens,
    generate_responses,
    model_facts,
    read_responses,
    weights_digest,
)
from tests.tiny_models import build, repetitive_prompt
from tests.training.conftest import SETTINGS

Generate = Callable[..., int]


@pytest.fixture
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[Prompt]
) -> Generate:
    """Return `generate_responses` with the fixtures as defaults; `path` is still required."""
    return partial(generate_responses, model, tokenizer, prompts=prompts, settings=SETTINGS)


def test_every_answer_is_plain_generates(
    model: PreTrainedModel, responses: list[Response], prompts: list[Prompt]
) -> None:
    assert [response.id for response in responses] == [prompt.id for prompt in prompts]
    for response in responses:
        ids = torch.tensor([response.prompt])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert response.response == expected.tolist()


def test_an_answer_ends_with_its_end_token_once(
    model: PreTrainedModel, generate: Generate, responses: list[Response], tmp_path: Path
) -> None:
    end = responses[0].response[4]
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = end
    assert end_tokens(model) == {end}
    generate(path=tmp_path / "ended.jsonl")
    ended = list(read_responses(tmp_path / "ended.jsonl"))
    assert any(response.response[-1] == end for response in ended)
    assert all(end not in response.response[:-1] for response in ended)
    assert ended[0].response == responses[0].response[: responses[0].response.index(end) + 1]


class TestResume:
    def test_it_goes_on_after_the_last_whole_line(self, generate: Generate, path: Path) -> None:
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:6]) + lines[6][:20])
        made: list[int] = []
        generate(path=path, progress=lambda done, _: made.append(done))
        assert sum(made) == 18 - 5
        assert path.read_bytes() == whole

    def test_nothing_is_left_to_do(self, generate: Generate, path: Path) -> None:
        before = path.read_bytes()
        assert generate(path=path) == 0
        assert path.read_bytes() == before

    def test_other_settings_are_refused(self, generate: Generate, path: Path) -> None:
        with pytest.raises(OptionError, match=r"max_new_tokens=12 \(now 3\)"):
            generate(path=path, settings=replace(SETTINGS, max_new_tokens=3))


class TestChangedPrompts:
    """Answers are matched to prompts by content, not by id."""

    def test_they_are_reordered_and_extended(
        self, generate: Generate, path: Path, prompts: list[Prompt], responses: list[Response]
    ) -> None:
        renamed = [replace(prompt, id=f"new{n}") for n, prompt in enumerate(reversed(prompts))]
        made: list[int] = []
        generate(
            path=path,
            prompts=[Prompt("first", "qa", ("w9 w9",)), *renamed],
            progress=lambda done, _: made.append(done),
        )
        assert sum(made) == 1
        found = list(read_responses(path))
        assert found[:-1] == responses
        assert found[-1].id == "first"

    def test_another_text_under_the_same_id_is_refused(
        self, generate: Generate, path: Path, prompts: list[Prompt]
    ) -> None:
        before = path.read_bytes()
        edited = [replace(prompts[0], turns=("w50 w51",)), *prompts[1:]]
        with pytest.raises(OptionError, match="holds answers to 1 prompts that are not among"):
            generate(path=path, prompts=edited)
        assert path.read_bytes() == before

    def test_other_weights_of_the_same_name_are_refused(
        self, model: PreTrainedModel, generate: Generate, path: Path
    ) -> None:
        with torch.no_grad():
            model.get_parameter("model.layers.0.mlp.up_proj.weight")[3, 5] += 1e-3
        with pytest.raises(OptionError, match=r"was made with weights=.* \(now .*choose another"):
            generate(path=path)

    def test_files_of_older_versions_are_read_and_not_resumed(
        self, generate: Generate, path: Path, responses: list[Response]
    ) -> None:
        head, *lines = map(json.loads, path.read_text().splitlines())
        del head["weights"]
        rows = [{k: v for k, v in line.items() if k != "key"} for line in lines]
        path.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))
        assert list(read_responses(path)) == responses
        with pytest.raises(OptionError, match="was made with weights=None"):
            generate(path=path)


class TestSampled:
    """Sampled answers to 18 prompts in batches of eight."""

    settings = replace(SETTINGS, temperature=1.0)

    @pytest.fixture
    def sampled(self, generate: Generate, tmp_path: Path) -> Path:
        path = tmp_path / "sampled.jsonl"
        generate(path=path, settings=self.settings, batch_size=8)
        return path

    def test_the_answers_are_not_the_greedy_ones(
        self, sampled: Path, responses: list[Response]
    ) -> None:
        found = list(read_responses(sampled))
        assert [r.prompt for r in found] == [r.prompt for r in responses]
        assert [r.response for r in found] != [r.response for r in responses]

    def test_the_seed_fixes_them(self, sampled: Path, generate: Generate, tmp_path: Path) -> None:
        again, other = tmp_path / "again.jsonl", tmp_path / "other.jsonl"
        torch.rand(7)
        generate(path=again, settings=self.settings, batch_size=8)
        assert again.read_bytes() == sampled.read_bytes()
        generate(path=other, settings=replace(self.settings, seed=1), batch_size=8)
        assert list(read_responses(other)) != list(read_responses(sampled))

    @pytest.mark.parametrize("num_batches", [1, 2])
    def test_a_run_cut_between_batches_equals_an_unbroken_one(
        self, sampled: Path, generate: Generate, num_batches: int
    ) -> None:
        whole = sampled.read_bytes()
        head_and_answers = whole.splitlines(keepends=True)[: 1 + 8 * num_batches]
        sampled.write_bytes(b"".join(head_and_answers))
        generate(path=sampled, settings=self.settings, batch_size=8)
        assert sampled.read_bytes() == whole

    @pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"seed": 2}])
    def test_another_way_of_sampling_is_refused(
        self, sampled: Path, generate: Generate, changes: dict[str, Any]
    ) -> None:
        with pytest.raises(OptionError, match=next(iter(changes))):
            generate(path=sampled, settings=replace(self.settings, **changes))


def test_prompts_that_are_too_long_are_counted(
    generate: Generate, prompts: list[Prompt], path: Path
) -> None:
    more = [*prompts, Prompt("long", "qa", ("w5 " * 41,))]
    assert generate(path=path, prompts=more) == 1


@pytest.mark.parametrize("content", [b'{"id": "a", "turns": ["b"]}\n', b"text", b"[1]", b"\xff"])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(content)
    with pytest.raises(OptionError, match="not a file of responses"):
        list(read_responses(tmp_path / "prompts.jsonl"))


@pytest.mark.parametrize("first", ["hello", "[1]", '"text"', ""])
def test_a_file_without_a_head_is_refused(tmp_path: Path, first: str) -> None:
    (tmp_path / "some.jsonl").write_text(first + "\n")
    with pytest.raises(OptionError, match="not a file of responses"):
        list(read_responses(tmp_path / "some.jsonl"))


def test_a_run_that_was_cut_short_is_read_so_far(path: Path) -> None:
    whole = list(read_responses(path))
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_responses(path)) == whole[:-1]


def test_a_last_line_without_an_end_is_read(path: Path) -> None:
    whole = list(read_responses(path))
    path.write_text(path.read_text().rstrip("\n"))
    assert list(read_responses(path)) == whole


def test_other_line_separators_are_text(path: Path) -> None:
    """The file starts with a byte order mark, and an id contains U+2028."""
    whole = list(read_responses(path))
    text = path.read_text().replace('"p1"', '"p\u20281\x85"')
    path.write_text(f"\ufeff{text}", encoding="utf-8")
    assert list(read_responses(path)) == [
        replace(whole[0]),
        replace(whole[1], id="p\u20281\x85"),
        *whole[2:],
    ]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="pipe is a pipe; use a regular file"):
        list(read_responses(tmp_path / "pipe"))


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        "no JSON",
        '{"id": "a", "task": "qa", "prompt": [], "response": [5]}',
        '{"id": "a", "task": "qa", "prompt": [5], "response": []}',
        '{"id": "a", "task": "qa", "prompt": [5], "response": "text"}',
        '{"id": "a", "task": "qa", "prompt": [5], "response": 5}',
        '{"id": "a", "task": "qa", "prompt": [5], "response": [0.5]}',
        "[" * 100_000,
        '{"id": "\xff"}',
    ],
)
def test_a_line_that_is_no_answer_is_named(path: Path, line: str) -> None:
    lines = path.read_text().splitlines()
    text = "\n".join([*lines[:3], line, *lines[3:]]) + "\n"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OptionError, match=r"line 4: .* remove the line"):
        list(read_responses(path))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, [5, 7]),  # the most frequent tokens of the answers
        (4, [2, 5, 7, 9]),  # then tokens of the prompts
        (99, [1, 2, 3, 5, 7, 9]),
    ],
)
def test_a_vocabulary_of_few_answers_is_filled_up_from_their_prompts(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    answered = [Response("a", "t", [1, 2, 2], [7, 5, 5]), Response("b", "t", [3, 9], [7, 9, 7, 5])]
    found = answer_vocabulary(model, iter(answered), size)
    assert found is not None
    assert found.tolist() == expected


class TestFrequentTokens:
    def test_the_most_frequent_ones_in_ascending_order(self) -> None:
        texts = [[7, 7, 7, 3, 3], [9, 3, 7, 9]]
        assert frequent_tokens(texts, 2, []).tolist() == [3, 7]

    def test_ties_go_to_the_lower_id(self) -> None:
        assert frequent_tokens([[9, 5, 8]], 2, []).tolist() == [5, 8]

    def test_some_are_always_there(self) -> None:
        assert frequent_tokens([[7, 7, 3]], 2, [50]).tolist() == [7, 50]


class TestWeights:
    def test_any_weight_counts(self) -> None:
        model = copy.deepcopy(build("llama"))
        before = weights_digest(model)
        assert weights_digest(copy.deepcopy(model)) == before
        for parameter in model.parameters():
            with torch.no_grad():
                flat = parameter.view(-1)
                flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
            assert weights_digest(model) != before
            with torch.no_grad():
                flat[-1] = torch.nextafter(flat[-1], torch.tensor(-9.0))
        assert weights_digest(model) == before

    def test_chunks_that_change_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hf_spec.training.responses.CHUNK", 8)
        model = copy.deepcopy(build("llama"))
        before = weights_digest(model)
        rows = model.get_input_embeddings().weight.data
        rows[[2, 3]] = rows[[3, 2]]
        assert weights_digest(model) != before

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        model = copy.deepcopy(build("llama")).to(dtype)
        facts = model_facts(model)
        assert facts["dtype"] == str(dtype).removeprefix("torch.")
        assert facts["weights"] != weights_digest(build("llama"))

    def test_generation_does_not_change_it(self) -> None:
        """Weight packing and compiled layers do not change the digest either."""
        model = copy.deepcopy(build("llama"))
        before = weights_digest(model)
        model.generate(repetitive_prompt(), max_new_tokens=8, spec_strategy="lookup")
        assert weights_digest(model) == before


def test_a_folder_is_known_by_its_whole_path(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder)
    assert model_facts(loaded)["model"] == str(folder)
    monkeypatch.chdir(tmp_path)
    assert model_facts(type(model).from_pretrained("model")) == model_facts(loaded)


FACTS = {"model": "a", "seed": 1}
PROMPTS = [[1, 2], [3], [1, 2]]


class TestKeys:
    def test_every_row_has_its_own(self) -> None:
        keys = answer_keys(FACTS, PROMPTS)
        assert len(set(keys)) == 3
        assert answer_keys(dict(reversed(FACTS.items())), PROMPTS) == keys

    def test_they_follow_the_content(self) -> None:
        keys = answer_keys(FACTS, PROMPTS)
        assert answer_keys(FACTS, [[9], [3], [1, 2], [1, 2]])[1:] == [
            keys[1],
            keys[0],
            keys[2],
        ]

    @pytest.mark.parametrize("facts", [{"model": "b", "seed": 1}, {"model": "a", "seed": 2}])
    def test_another_run_has_others(self, facts: dict[str, object]) -> None:
        assert not {*answer_keys(facts, PROMPTS)} & {*answer_keys(FACTS, PROMPTS)}

    def test_answers_to_other_prompts_are_refused(self) -> None:
        check_answered(Path("f"), ["a"], ["a", "b"])
        with pytest.raises(OptionError, match="f holds answers to 1 prompts that are not among"):
            check_answered(Path("f"), ["a", None], ["a", "b"])
