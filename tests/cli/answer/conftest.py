"""A tiny model in a folder, with a word-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hf_spec.cli.answer.responder import Responder
from hf_spec.cli.options import AnswerSettings
from tests.tiny_models import VOCAB, build

PROMPT = " ".join(f"w{word}" for word in (11, 12, 13) * 4)
# Every role, and the start of the answer, is a word of the prompt.
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}answer"


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    marks = ["<pad>", "<unk>", "</s>", "system", "user", "assistant", "answer"]
    words = [*marks, *(f"w{index}" for index in range(len(marks), VOCAB))]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("commands") / "model"
    build("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def responder(tokenizer: Any) -> Responder:
    """Return a responder of the tiny Llama with lookup and 24 new tokens."""
    return Responder(build("llama"), tokenizer, AnswerSettings("lookup", 24))
