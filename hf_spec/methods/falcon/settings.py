"""Settings of Falcon heads and their training."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import (
    Count,
    Internal,
    Named,
    PositiveWeight,
    Settings,
    Share,
    Weight,
    Within,
)
from hf_spec.training.settings import DraftVocabularySettings, StartOptions, Training, TrainSettings

FALCON_RUN = TrainSettings(epochs=8, learning_rate=2e-3)


@dataclass(frozen=True)
class FalconShape(Settings):
    """Sizes of a Falcon head.

    Attributes:
        block_size: tokens drafted per pass, 1 to 4. It is the paper's k.
        num_layers: attention layers. They start as copies of the target's last ones.
        recurrent: carry the LSTM's state along the text. So does the paper; the released code
            resets it at every pair.
        fused: also read three earlier hidden states of the target. So does EAGLE-3 (Li et al. 2025,
            arXiv 2503.01840); the paper reads the last one.
        mlp_size: width of the layers' MLPs. Default: the target's.
        dropout: dropout between the LSTM layers, in training.
    """

    panel = "Head"

    block_size: Annotated[int, Within(1, 4)] = 2
    num_layers: Count = 1
    recurrent: bool = False
    fused: bool = False
    mlp_size: Count | None = None
    dropout: Internal[Share] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout == 1:
            raise OptionError(f"dropout={self.dropout!r} must be below 1")


@dataclass(frozen=True)
class CsgdSettings(Settings):
    """Settings of the loss; `hf_spec.methods.falcon.csgd` explains the choices.

    Attributes:
        schedule: schedule of replaced inputs. Their share decreases to 0 over any number of epochs
            ("steps"), or none is replaced ("off"). See hf_spec.methods.falcon.csgd.
        noise: noise on input features. See hf_spec.methods.falcon.csgd.
        hard_label: source of the hard label. It is the token in the data, or one drawn from the
            target.
        replaced_token: token of replaced inputs. It is the target's first choice, or that of the
            data.
        feature_weight: weight of the feature loss. The loss is a smooth L1 distance.
        soft_weight: weight of the soft loss. The loss is the cross-entropy with the target's
            distribution.
        hard_weight: weight of the hard loss. The loss is the cross-entropy with the hard label.
        soft_temperature: temperature of the soft loss. It divides the head's logits; the released
            code has 0.95.
        own_features: share of predicted inputs. The head predicts their input features.
        own_passes: passes that predict inputs. Each reads the predictions of the pass before.
        learn_replaced: also learn at replaced inputs. They contain their answers.
        learn_prompts: also learn the tokens of prompts that are read.
    """

    panel = "Loss"

    schedule: Annotated[Literal["paper", "released", "steps", "off"], Named("csgd")] = "paper"
    noise: Literal["paper", "released", "off"] = "paper"
    hard_label: Literal["token", "gumbel"] = "token"
    replaced_token: Internal[Literal["teacher", "data"]] = "teacher"
    feature_weight: Weight = 1.0
    soft_weight: Weight = 0.09
    hard_weight: Weight = 0.01
    soft_temperature: PositiveWeight = 1.0
    own_features: Share = 0.0
    own_passes: Count = 1
    learn_replaced: bool = True
    learn_prompts: bool = False

    def share(self, epoch: int, num_epochs: int, done: float = 0.0) -> float:
        """Return lambda in an epoch counted from 0, after the share `done` of all steps."""
        left = (num_epochs - epoch) / num_epochs
        by_step = 0.4 * (1 - done)
        shares = {"paper": 0.4 * left, "released": 0.35 * left + 0.1, "steps": by_step, "off": 0.0}
        return shares[self.schedule]


@dataclass(frozen=True)
class FalconTrainSettings(DraftVocabularySettings):
    """Settings of `train_falcon`.

    Attributes:
        shape: sizes of the head.
        csgd: settings of the loss.
        keep_vocabulary: use the vocabulary of the --init head.
        max_depth: most tokens of a draft, stored in the adapter.
    """

    shape: FalconShape = field(default_factory=FalconShape)
    csgd: CsgdSettings = field(default_factory=CsgdSettings)
    keep_vocabulary: Annotated[bool, Named("keep_vocab")] = False
    max_depth: Internal[Count] = 8


TRAINING = Training(
    name="falcon",
    settings=FalconTrainSettings,
    run=FALCON_RUN,
    features="last",
    options=StartOptions,
    function="hf_spec.methods.falcon.training:run_training",
    online="hf_spec.methods.falcon.training:online_training",
    result="the adapter",
    strategy="falcon",
    help="""Train a Falcon head, which drafts several tokens in one pass.

    Use the head with generate(..., spec_strategy="falcon", assistant=OUT).

        hf-spec train falcon MODEL --responses answers.jsonl --out my-head
    """,
)
