"""Settings for training MTP modules."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass

from hf_spec.common.settings import Count, PositiveShare
from hf_spec.training.settings import HeadSettings, StartOptions, Training, TrainSettings

MTP_RUN = TrainSettings(epochs=4)


@dataclass(frozen=True)
class MtpTrainSettings(HeadSettings):
    """Settings of an MTP module and its loss.

    Attributes:
        steps: consecutive draft steps in the loss.
        step_weight: loss weight of a step relative to the step before.
    """

    steps: Count = 3
    step_weight: PositiveShare = 0.6


TRAINING = Training(
    name="mtp",
    settings=MtpTrainSettings,
    run=MTP_RUN,
    features="last",
    options=StartOptions,
    function="hf_spec.methods.mtp.training:run_training",
    result="the module",
    strategy="mtp",
    help="""Train an MTP module, a decoder layer that drafts on the target's last hidden state.

    A new module starts as the target's last layer. --init MODEL fine-tunes the module in the
    target's own files. Hidden states are computed first for all texts, once, and stored beside the
    answers; train falcon uses the same. Use the module with
    model.generate(..., spec_strategy="mtp", assistant=OUT).

        hf-spec train mtp MODEL --responses answers.jsonl --out my-module --steps 3
        hf-spec train mtp MODEL --responses answers.jsonl --out my-module --init MODEL
    """,
)
