"""The tiny model and the prompts of the benchmarks' tests."""

from tests.evaluation.bench.conftest import *  # noqa: F403
