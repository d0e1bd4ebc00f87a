"""The tiny target and its answers, as the tests of training have them."""

from tests.training.conftest import (
    examples,
    model,
    path,
    prompts,
    responses,
    tokenizer,
)

__all__ = [
    "examples",
    "model",
    "path",
    "prompts",
    "responses",
    "tokenizer",
]
