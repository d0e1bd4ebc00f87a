"""Settings for training Medusa heads."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass

from hf_spec.common.settings import Count, PositiveShare
from hf_spec.training.settings import DraftVocabularySettings, StartOptions, Training, TrainSettings

MEDUSA_RUN = TrainSettings(epochs=4)


@dataclass(frozen=True)
class MedusaTrainSettings(DraftVocabularySettings):
    """Settings of Medusa heads and their loss.

    Attributes:
        num_heads: number of heads. Each drafts one token.
        num_layers: residual blocks of a head.
        step_weight: loss weight of a head relative to the head before.
    """

    num_heads: Count = 4
    num_layers: Count = 1
    step_weight: PositiveShare = 0.8


TRAINING = Training(
    name="medusa",
    settings=MedusaTrainSettings,
    run=MEDUSA_RUN,
    features="last",
    options=StartOptions,
    function="hf_spec.methods.medusa.training:run_training",
    result="the heads",
    strategy="heads",
    help="""Train Medusa heads, in vLLM's layout.

    The target's last hidden states are computed first for all texts, once, and stored beside the
    answers; train falcon uses the same. Use the heads with
    model.generate(..., spec_strategy="heads", assistant=OUT).

        hf-spec train medusa MODEL --responses answers.jsonl --out my-heads --num-heads 4
    """,
)
