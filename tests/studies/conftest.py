"""The tiny model and the prompts of the benchmarks' tests."""

from tests.bench.conftest import (
    folder,
    model,
    packing_as_by_default,
    prompt_file,
    prompts,
    tokenizer,
)

__all__ = [
    "folder",
    "model",
    "packing_as_by_default",
    "prompt_file",
    "prompts",
    "tokenizer",
]
