"""Settings of DISCO classifiers and their training, and the features that they read."""

# Must not import torch or transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight
from hf_spec.training.settings import Training

# Number of probabilities among the features, and the columns of each feature group.
TOP = 10
FEATURES = {"top_probs": slice(0, TOP), "entropy": slice(TOP, TOP + 1), "position": slice(-1, None)}


@dataclass(frozen=True)
class DiscoTrainSettings(Settings):
    """Settings of `hf-spec train disco`.

    Attributes:
        labels: equal draft and target token (hard), or acceptance probability (soft).
        hidden_size: width of the classifier.
        class_weights: weight accepted tokens so that both classes have the same total weight.
        validation_share: share of held-out prompts, sampled with `seed`.
        learning_rate, weight_decay: settings of AdamW.
        batch_size: positions per batch.
        max_epochs: most passes over the data.
        patience: epochs without a lower validation loss after which training stops.
        seed: random seed. It fixes the split, the initial weights and the data order.
        threshold, max_draft_tokens: values of the adapter until it is calibrated.
    """

    panel = "Training"

    labels: Literal["hard", "soft"] = "hard"
    hidden_size: Internal[Count] = 32
    class_weights: Internal[bool] = True
    validation_share: Internal[Share] = 0.15
    learning_rate: Internal[Weight] = 1e-3
    weight_decay: Internal[Weight] = 0.01
    batch_size: Internal[Count] = 1024
    max_epochs: Internal[Count] = 100
    patience: Internal[Count] = 5
    seed: int = 0
    threshold: Internal[Share] = 0.5
    max_draft_tokens: Internal[Count] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.validation_share < 1:
            raise OptionError(f"validation_share={self.validation_share!r} must be between 0 and 1")


@dataclass(frozen=True)
class DiscoOptions(Settings):
    """The draft model whose drafts are judged, and the answers that count.

    Attributes:
        draft: draft model, folder or Hub id.
        draft_layers: number of the target's own first layers, instead of --draft.
        tasks: learn only from this task.
    """

    panel = "Draft model"

    draft: str | None = None
    draft_layers: Count | None = None
    tasks: Annotated[tuple[str, ...], Named("task")] = ()


TRAINING = Training(
    name="disco",
    settings=DiscoTrainSettings,
    options=DiscoOptions,
    several_files=False,
    function="hf_spec.methods.disco.training:run_training",
    result="the adapter",
    strategy="disco",
    help="""Train the classifier that stops the drafts of a draft model.

    It learns from the target's own answers whether each token of the draft model would have been
    accepted. Then choose its threshold with `hf-spec calibrate disco`, and use it:
    model.generate(..., spec_strategy="disco", assistant=OUT).

        hf-spec train disco MODEL --responses answers.jsonl --draft DRAFT --out my-disco
    """,
)
