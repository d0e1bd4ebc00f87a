"""A tiny target, its tokenizer, prompts, and its answers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_spec.common.prompts import Prompt
from hf_spec.training.answers import Example, teacher_examples
from hf_spec.training.responses import (
    Response,
    ResponseSettings,
    generate_responses,
    read_responses,
)
from tests.tiny_models import VOCAB, build

# Fixtures that tests in other folders import.
__all__ = ["examples", "model", "path", "prompts", "responses", "tokenizer"]

SETTINGS = ResponseSettings(max_new_tokens=12, max_prompt_tokens=40)


@pytest.fixture
def model() -> PreTrainedModel:
    return copy.deepcopy(build("llama"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer where token 5 is the word w5."""
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0")


@pytest.fixture
def prompts() -> list[Prompt]:
    """Return 18 prompts of different lengths, half of them for the task code."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCAB, (2 + n % 5,), generator=generator) for n in range(18)]
    return [
        Prompt(f"p{n}", "code" if n % 2 else "qa", (" ".join(f"w{i}" for i in text.tolist()),))
        for n, text in enumerate(texts)
    ]


@pytest.fixture
def path(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[Prompt],
    tmp_path: Path,
) -> Path:
    """Write a file with the answers to all prompts and return its path."""
    file = tmp_path / "responses.jsonl"
    generate_responses(model, tokenizer, prompts, file, SETTINGS, batch_size=8)
    return file


@pytest.fixture
def responses(path: Path) -> list[Response]:
    return list(read_responses(path))


@pytest.fixture
def examples(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Example]:
    """Return the answers with the target's top-8 probabilities."""
    return teacher_examples(model, responses, tmp_path / "teacher", top=8)
