"""Fixtures of the training tests: the tiny target and its responses."""

from tests.training.conftest import *  # noqa: F403
