"""Settings of the training of draft models."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.settings import Count, Internal, Named, Settings, Share
from hf_spec.training.settings import TrainSettings

DRAFT_RUN = TrainSettings(learning_rate=2e-3)


@dataclass(frozen=True)
class DraftTrainSettings(Settings):
    """What a draft model is trained to be.

    Attributes:
        num_layers: layers of the draft model.
        rank: rank of the LoRA.
        vocabulary_size: most frequent tokens that it can propose; None for all.
        hard_weight: share of the cross-entropy with the token that the target chose.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
    """

    num_layers: Annotated[Count, Named("layers")] = 4
    rank: Count = 64
    vocabulary_size: Annotated[Count | None, Named("vocabulary")] = 8192
    hard_weight: Internal[Share] = 0.3
    held_back: Internal[Share] = 0.03
