"""Shared fixtures of the tests on real models."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """Use two threads, divided among the processes of `pytest -n`."""
    before = torch.get_num_threads()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, 2 // processes))
    yield
    torch.set_num_threads(before)
