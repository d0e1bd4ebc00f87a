"""Fixtures of the benchmark tests: the tokenizer and the prompts."""

from tests.evaluation.bench.conftest import *  # noqa: F403
