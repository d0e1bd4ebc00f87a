"""Settings of the training of EAGLE-3 heads."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share
from hf_spec.training.settings import TrainSettings

EAGLE_RUN = TrainSettings(epochs=4)


@dataclass(frozen=True)
class EagleTrainSettings(Settings):
    """What an EAGLE-3 head is trained to be.

    Attributes:
        steps: draft steps in a row that it is trained on; the paper's training-time test.
        step_weight: of the loss of a step, by that of the step before it.
        mlp_size: width of its MLP; by default the target's, or that of the head to go on from.
        vocabulary_size: most frequent tokens that it can propose; None for all.
        max_context: last tokens of a prompt that are read in training; None for all.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
    """

    steps: Count = 4
    step_weight: Share = 0.8
    mlp_size: Count | None = None
    vocabulary_size: Annotated[Count | None, Named("vocabulary")] = 8192
    max_context: Count | None = 64
    held_back: Internal[Share] = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step_weight:
            raise OptionError(f"step_weight={self.step_weight!r} must be above 0")
