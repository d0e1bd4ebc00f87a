"""The methods are known to whoever imports one module, as the command line does."""

from __future__ import annotations

from hf_spec.adapters.adapter import known_methods
from hf_spec.methods import adapter_methods as methods
from tests.forked_python import ForkedPython


def test_every_module_of_a_method_registers_it() -> None:
    names = [getattr(methods, name).METHOD for name in methods.__all__]
    assert sorted(names) == known_methods()


def test_the_module_is_enough(new_python: ForkedPython) -> None:
    code = (
        "import sys, hf_spec.methods.adapter_methods; "
        "from hf_spec.adapters.adapter import known_methods; "
        "print(*known_methods(), 'hf_spec.public' in sys.modules)"
    )
    done = new_python.run(code, "/usr/bin/hf-spec", "card")
    assert done.out.split() == ["disco", "draft", "falcon", "sdsat", "False"]
