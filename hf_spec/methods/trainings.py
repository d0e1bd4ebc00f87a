"""The trainings of the methods, for `hf-spec train`."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import hf_spec.methods
from hf_spec.training.settings import Training


def known_trainings() -> list[Training]:
    """Return the `TRAINING` of every method folder whose `settings.py` has one, by name."""
    prefix = f"{hf_spec.methods.__name__}."
    folders = [m.name for m in pkgutil.iter_modules(hf_spec.methods.__path__, prefix) if m.ispkg]
    names = [f"{folder}.settings" for folder in folders]
    modules = [importlib.import_module(n) for n in names if importlib.util.find_spec(n)]
    trainings = [module.TRAINING for module in modules if hasattr(module, "TRAINING")]
    return sorted(trainings, key=lambda training: training.name)
