"""The families of published heads are known to whoever imports one module."""

from __future__ import annotations

from hf_spec.adapters import published
from hf_spec.methods import head_families as families


def test_every_module_of_the_room_that_builds_a_family_is_imported() -> None:
    modules = {getattr(families, name).__name__ for name in families.__all__}
    builders = {family.build.__module__ for family in published._FAMILIES.values()}
    # PARD's is registered with its strategy.
    modules.add("hf_spec.methods.pard.drafter")
    assert modules == {name for name in builders if name.startswith("hf_spec.methods.")}
