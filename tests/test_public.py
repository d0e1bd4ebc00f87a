"""Exports of the package: the same names everywhere, and enabled by the import alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hf_spec
from hf_spec import public
from tests.forked_python import ForkedPython

ROOT = Path(__file__).parents[1]


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_has_every_name() -> None:
    assert hf_spec.__all__ == public.__all__
    assert len(set(public.__all__)) == len(public.__all__)
    for name in public.__all__:
        assert getattr(hf_spec, name) is getattr(public, name)


@pytest.mark.full
def test_an_import_is_enough(new_python: ForkedPython) -> None:
    code = (
        "import hf_spec; from transformers import GenerationMixin; "
        "print(hasattr(GenerationMixin.generate, '_hf_spec_wrapped'), 'SpecError' in vars(hf_spec))"
    )
    done = new_python.run(code)
    assert (done.out.split(), done.status) == (["True", "True"], 0), done.err


@pytest.mark.full
def test_in_the_command_the_first_name_brings_everything() -> None:
    code = (
        "import sys; sys.argv = ['/usr/bin/hf-spec', 'demo']; import hf_spec; "
        "print('torch' in sys.modules, hf_spec.SpecError.__name__, 'torch' in sys.modules); "
        "from transformers import GenerationMixin; "
        "print(hasattr(GenerationMixin.generate, '_hf_spec_wrapped'), hasattr(hf_spec, 'nothing'))"
    )
    assert run_python(code).split() == ["False", "SpecError", "True", "True", "False"]
