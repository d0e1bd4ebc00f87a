"""Answers of the target: plain generate's own, written once, continued after an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_spec import OptionError
from hf_spec.bench.prompts import Prompt
from hf_spec.training.responses import (
    Response,
    end_tokens,
    generate_responses,
    read_responses,
)
from tests.training.conftest import SETTINGS


def test_every_answer_is_plain_generates(
    model: PreTrainedModel, responses: list[Response], prompts: list[Prompt]
) -> None:
    assert [response.id for response in responses] == [prompt.id for prompt in prompts]
    for response in responses:
        ids = torch.tensor([response.prompt])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert response.response == expected.tolist()


def test_an_answer_ends_with_its_end_token_once(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[Prompt],
    responses: list[Response],
    tmp_path: Path,
) -> None:
    end = responses[0].response[4]
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = end
    assert end_tokens(model) == {end}
    file = tmp_path / "ended.jsonl"
    generate_responses(model, tokenizer, prompts, file, SETTINGS)
    ended = list(read_responses(file))
    assert any(response.response[-1] == end for response in ended)
    assert all(end not in response.response[:-1] for response in ended)
    assert ended[0].response == responses[0].response[: responses[0].response.index(end) + 1]


class TestResume:
    def test_it_goes_on_behind_the_last_whole_line(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        prompts: list[Prompt],
        path: Path,
    ) -> None:
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:6]) + lines[6][:20])
        made: list[int] = []
        generate_responses(
            model, tokenizer, prompts, path, SETTINGS, progress=lambda done, _: made.append(done)
        )
        assert sum(made) == len(prompts) - 5
        assert path.read_bytes() == whole

    def test_nothing_is_left_to_do(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        prompts: list[Prompt],
        path: Path,
    ) -> None:
        before = path.read_bytes()
        assert generate_responses(model, tokenizer, prompts, path, SETTINGS) == 0
        assert path.read_bytes() == before

    def test_other_settings_are_refused(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        prompts: list[Prompt],
        path: Path,
    ) -> None:
        with pytest.raises(OptionError, match=r"max_new_tokens=12 \(now 3\)"):
            generate_responses(model, tokenizer, prompts, path, replace(SETTINGS, max_new_tokens=3))


def test_prompts_that_are_too_long_are_counted(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[Prompt], path: Path
) -> None:
    more = [*prompts, Prompt("long", "qa", ("w5 " * 41,))]
    assert generate_responses(model, tokenizer, more, path, SETTINGS) == 1


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "turns": ["b"]}\n')
    with pytest.raises(OptionError, match="no file of responses"):
        list(read_responses(tmp_path / "prompts.jsonl"))
