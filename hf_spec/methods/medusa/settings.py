"""Settings for training Medusa heads."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share
from hf_spec.training.settings import StartOptions, Training, TrainSettings

MEDUSA_RUN = TrainSettings(epochs=4)


@dataclass(frozen=True)
class MedusaTrainSettings(Settings):
    """Settings of Medusa heads and their loss.

    Attributes:
        num_heads: number of heads. Each drafts one token.
        num_layers: residual blocks of a head.
        step_weight: loss weight of a head relative to the head before.
        vocabulary_size: number of most frequent tokens it can draft; None for all.
        max_context: last tokens of a prompt that it learns from; None for all.
        held_back: share of the prompts that are held out, chosen by a hash of their ids.
    """

    panel = "Head"

    num_heads: Count = 4
    num_layers: Count = 1
    step_weight: Share = 0.8
    vocabulary_size: Annotated[Count | None, Named("vocab_size")] = 8192
    max_context: Count | None = 64
    held_back: Internal[Share] = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step_weight:
            raise OptionError(f"step_weight={self.step_weight!r} must be above 0")


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
