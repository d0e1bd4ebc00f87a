"""Descriptions of trainings, from which `hf-spec train NAME` is built.

A method describes its training as `TRAINING` in the `settings.py` of its folder.
"""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hf_spec.common.settings import Settings
from hf_spec.training.settings import TrainSettings

# Panel of the model, the answers and what is computed from them, in a help text.
DATA = "Model and data"


@dataclass(frozen=True)
class TeacherOptions(Settings):
    """Storage of the target's next-token distributions.

    Attributes:
        teacher: target distributions. Default: beside the answers.
    """

    panel = DATA

    teacher: Path | None = None


@dataclass(frozen=True)
class FeatureOptions(Settings):
    """Storage of the target's features.

    Attributes:
        features: folder of target features. Default: beside the answers.
        store: store the features on disk. Otherwise they are computed in every step.
    """

    panel = DATA

    features: Path | None = None
    store: bool = True


@dataclass(frozen=True)
class StartOptions(Settings):
    """Starting point of a head.

    Attributes:
        init: head to start from, folder or Hub id. Its sizes must agree.
    """

    panel = DATA

    init: str | None = None


@dataclass(frozen=True)
class Training:
    """A training that `hf-spec train NAME` runs.

    Attributes:
        name: name of the command.
        help: help text of the command.
        settings: class of the method's settings.
        function: "module:function" of the training; takes a `TrainingJob`, returns a
            `TrainingResult`.
        result: what the training writes, for the help of --out.
        strategy: strategy of the `hf-spec bench` command that is suggested at the end.
        run: defaults of the shared training loop; None if the method has its own loop.
        teacher: True if it reads the target's next-token distributions.
        features: hidden states of the target that it reads: "last", the last ones; "fused", those
            of several layers; None if it reads none.
        options: further options of the command.
        several_files: True if --responses may be repeated.
    """

    name: str
    help: str
    settings: type[Settings]
    function: str
    result: str
    strategy: str
    run: TrainSettings | None = None
    teacher: bool = False
    features: Literal["last", "fused"] | None = None
    options: type[Settings] | None = None
    several_files: bool = True

    @property
    def data_options(self) -> type[Settings] | None:
        """Options of the data that is computed from the answers and cached beside them."""
        if self.features is not None:
            return FeatureOptions
        return TeacherOptions if self.teacher else None
