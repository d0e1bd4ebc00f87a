"""Tests that build a C++ kernel are for machines with a compiler; others do without the kernel."""

from __future__ import annotations

import pytest
from hf_spec_kernels.build import compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
