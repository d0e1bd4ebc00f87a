"""The methods are known to whoever imports one module, as the command line does."""

from __future__ import annotations

from hf_spec.adapters import published
from hf_spec.adapters.adapter import known_methods
from hf_spec.models import methods
from tests.forked_python import ForkedPython


def test_every_module_of_a_method_registers_it() -> None:
    modules = [getattr(methods, name) for name in methods.__all__]
    own = [module for module in modules if hasattr(module, "METHOD")]
    assert sorted(module.METHOD for module in own) == known_methods()
    # The others build the heads of a published family.
    builders = {family.build.__module__ for family in published._FAMILIES.values()}
    assert {module.__name__ for module in modules if module not in own} <= builders


def test_the_module_is_enough(new_python: ForkedPython) -> None:
    code = (
        "import sys, hf_spec.models.methods; "
        "from hf_spec.adapters.adapter import known_methods; "
        "print(*known_methods(), 'hf_spec.public' in sys.modules)"
    )
    done = new_python.run(code, "/usr/bin/hf-spec", "card")
    assert done.out.split() == ["disco", "draft", "falcon", "sdsat", "False"]
