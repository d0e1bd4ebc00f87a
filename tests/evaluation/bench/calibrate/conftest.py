"""The tiny target and its answers, as the tests of training have them."""

from tests.training.conftest import *  # noqa: F403
