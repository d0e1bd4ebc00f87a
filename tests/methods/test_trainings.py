"""Registered trainings: none is missing, and their functions exist."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import pytest

from hf_spec.methods import trainings
from hf_spec.methods.registry import known_strategies
from hf_spec.methods.trainings import known_trainings
from hf_spec.training.settings import Training

TRAININGS = known_trainings()


def test_every_training_of_a_folder_is_known() -> None:
    folders = Path(trainings.__file__).parent.glob("*/training.py")
    modules = {f"hf_spec.methods.{path.parent.name}.training" for path in folders}
    assert {training.function.partition(":")[0] for training in TRAININGS} == modules
    names = [training.name for training in TRAININGS]
    expected = ["block", "disco", "draft", "eagle", "falcon", "medusa", "mtp", "sdsat"]
    assert names == sorted(set(names)) == expected


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_it_can_run(training: Training) -> None:
    assert callable(pkgutil.resolve_name(training.function))
    assert training.strategy in known_strategies()
    assert f"hf-spec train {training.name}" in training.help
