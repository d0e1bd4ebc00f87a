"""The built-in methods are registered by importing one module, and every folder is among them."""

from __future__ import annotations

from pathlib import Path

import hf_spec
from hf_spec.methods import builtin
from hf_spec.methods.registry import known_strategies, parse_strategy

# Rows of (token, feature) pairs, which Falcon, EAGLE and MTP heads share.
SHARED = "feature_pairs"


def test_every_folder_registers_a_strategy() -> None:
    methods = Path(builtin.__file__).parent
    folders = {init.parent.name for init in methods.glob("*/__init__.py")} - {SHARED}
    modules = {type(parse_strategy(name)).__module__ for name in known_strategies()}
    assert folders <= {module.split(".")[2] for module in modules}


def test_configs_are_exported() -> None:
    configs = {type(parse_strategy(name)).__name__ for name in known_strategies()}
    assert configs == set(builtin.__all__)
    assert configs <= set(hf_spec.__all__)
