"""Fixtures of the benchmark tests: the tiny model and the prompts."""

from tests.evaluation.bench.conftest import *  # noqa: F403
