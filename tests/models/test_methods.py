"""The methods are known to whoever imports one module, as the command line does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hf_spec.adapters import published
from hf_spec.adapters.adapter import known_methods
from hf_spec.models import methods

ROOT = Path(__file__).parents[2]


def test_every_module_of_a_method_registers_it() -> None:
    modules = [getattr(methods, name) for name in methods.__all__]
    own = [module for module in modules if hasattr(module, "METHOD")]
    assert sorted(module.METHOD for module in own) == known_methods()
    # The others build the heads of a published family.
    builders = {family.build.__module__ for family in published._FAMILIES.values()}
    assert {module.__name__ for module in modules if module not in own} <= builders


def test_the_module_is_enough() -> None:
    code = (
        "import sys; sys.argv = ['/usr/bin/hf-spec', 'card']; import hf_spec.models.methods; "
        "from hf_spec.adapters.adapter import known_methods; "
        "print(*known_methods(), 'hf_spec.public' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["disco", "draft", "falcon", "sdsat", "False"]
