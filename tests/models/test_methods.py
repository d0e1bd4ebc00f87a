"""The methods are known to whoever imports one module, as the command line does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hf_spec.adapters.adapter import known_methods
from hf_spec.models import methods

ROOT = Path(__file__).parents[2]


def test_every_module_of_a_method_registers_it() -> None:
    modules = [getattr(methods, name) for name in methods.__all__]
    assert sorted(module.METHOD for module in modules) == known_methods()


def test_the_module_is_enough() -> None:
    code = (
        "import sys; sys.argv = ['/usr/bin/hf-spec', 'card']; import hf_spec.models.methods; "
        "from hf_spec.adapters.adapter import known_methods; "
        "print(*known_methods(), 'hf_spec.public' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["disco", "draft", "falcon", "sdsat", "False"]
