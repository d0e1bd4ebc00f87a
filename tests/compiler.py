"""Helpers for tests that build C++ kernels, which are skipped on machines without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from hf_spec_kernels import build
from hf_spec_kernels.build import compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@contextmanager
def built_for(processor: str, cached: Callable[..., Any]) -> Iterator[None]:
    """Build kernels for a processor (a GCC `-march` name) inside the block.

    `cached` is the cached function that loads the kernel.
    """
    forget = build.load.cache_clear, cached.cache_clear  # type: ignore[attr-defined]
    flags = [flag.replace("native", processor) for flag in build.FLAGS]
    try:
        for one in forget:
            one()
        with patch.object(build, "FLAGS", flags):
            yield
    finally:
        for one in forget:
            one()
