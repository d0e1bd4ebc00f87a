"""Settings of draft models and their training."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.settings import Count, Internal, Named, Settings, Share
from hf_spec.training.settings import Training, TrainSettings

DRAFT_RUN = TrainSettings(learning_rate=2e-3)


@dataclass(frozen=True)
class DraftTrainSettings(Settings):
    """Shape and loss of a draft model.

    Attributes:
        num_layers: layers of the draft model.
        rank: rank of the LoRA.
        vocabulary_size: number of most frequent tokens it can draft; None for all.
        hard_weight: weight of the cross-entropy with the token that the target chose, 0 to 1.
        held_back: share of the prompts that are held out, chosen by a hash of their ids.
    """

    panel = "Draft model"

    num_layers: Count = 4
    rank: Count = 64
    vocabulary_size: Annotated[Count | None, Named("vocab_size")] = 8192
    hard_weight: Internal[Share] = 0.3
    held_back: Internal[Share] = 0.03


TRAINING = Training(
    name="draft",
    settings=DraftTrainSettings,
    run=DRAFT_RUN,
    teacher=True,
    several_files=False,
    function="hf_spec.methods.draft_model.training:run_training",
    result="the adapter",
    strategy="tree",
    help="""Train a draft model from the target's first layers.

    The target's next-token distributions over the answers are computed first, once, and stored
    beside them. Use the model with model.generate(..., spec_strategy="draft", assistant=OUT), or
    "tree", or "gsd".

        hf-spec train draft MODEL --responses answers.jsonl --out my-draft --num-layers 2
    """,
)
