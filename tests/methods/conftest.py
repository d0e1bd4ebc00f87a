"""The tiny target and its answers, shared with the tests of training."""

from tests.training.conftest import *  # noqa: F403
