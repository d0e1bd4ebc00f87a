"""Settings for training EAGLE-3 heads."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass

from hf_spec.common.settings import Count, PositiveShare
from hf_spec.training.settings import DraftVocabularySettings, StartOptions, Training, TrainSettings

EAGLE_RUN = TrainSettings(epochs=4)


@dataclass(frozen=True)
class EagleTrainSettings(DraftVocabularySettings):
    """Settings of an EAGLE-3 head and its loss.

    Attributes:
        steps: consecutive draft steps in the loss. The paper calls them training-time test.
        step_weight: loss weight of a step relative to the step before.
        mlp_size: width of the MLP. Default: the target's, or that of the head to start from.
    """

    steps: Count = 4
    step_weight: PositiveShare = 0.8
    mlp_size: Count | None = None


TRAINING = Training(
    name="eagle",
    settings=EagleTrainSettings,
    run=EAGLE_RUN,
    features="fused",
    options=StartOptions,
    function="hf_spec.methods.eagle.training:run_training",
    online="hf_spec.methods.eagle.training:online_training",
    result="the head",
    strategy="eagle",
    help="""Train an EAGLE-3 head, in the layout of vLLM's speculators.

    Hidden states of four layers of the target are computed first for all texts, once, and stored
    beside the answers. Use the head with
    model.generate(..., spec_strategy="eagle", assistant=OUT).

        hf-spec train eagle MODEL --responses answers.jsonl --out my-head --steps 4
        hf-spec train eagle MODEL --responses more.jsonl --out my-next-head --init my-head
    """,
)
