"""Fixtures: a tiny model, a word tokenizer, a folder with both, and two prompts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_spec
from hf_spec.common.prompts import Prompt
from tests.tiny_models import VOCAB, build

# Fixtures that other test packages import.
__all__ = ["folder", "model", "packing_as_by_default", "prompt_file", "prompts", "tokenizer"]

TEXTS = {"count": "one two three one two three one", "letters": "a b c d a b"}


@pytest.fixture(autouse=True)
def packing_as_by_default() -> Iterator[None]:
    yield
    hf_spec.set_cpu_packing("auto")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    known = sorted({word for text in TEXTS.values() for word in text.split()} | {"the", "and", "."})
    words = ["<pad>", "<unk>", *known]
    words += [f"word{index}" for index in range(VOCAB - len(words))]
    backend = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def prompts() -> list[Prompt]:
    return [Prompt(f"{task}-1", task, (text,)) for task, text in TEXTS.items()]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": i, "task": task, "turns": [text]} for i, (task, text) in enumerate(TEXTS.items())
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    copy.deepcopy(model).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
