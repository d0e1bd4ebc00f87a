"""The tokenizer and the prompts of the benchmarks' tests."""

from tests.bench.conftest import *  # noqa: F403
