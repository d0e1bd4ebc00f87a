"""The families of published heads are known to whoever imports one module."""

from __future__ import annotations

from hf_spec.adapters import published
from hf_spec.heads import families
from tests.forked_python import ForkedPython


def test_every_module_of_the_room_that_builds_a_family_is_imported() -> None:
    modules = {getattr(families, name).__name__ for name in families.__all__}
    builders = {family.build.__module__ for family in published._FAMILIES.values()}
    assert modules == {name for name in builders if name.startswith("hf_spec.heads.")}


def test_the_module_is_enough(new_python: ForkedPython) -> None:
    code = (
        "import sys, hf_spec.heads.families; from hf_spec.adapters import published; "
        "print(*sorted(published._FAMILIES), 'hf_spec.public' in sys.modules)"
    )
    done = new_python.run(code)
    assert {"eagle3", "medusa", "mtp", "False"} <= set(done.out.split())
