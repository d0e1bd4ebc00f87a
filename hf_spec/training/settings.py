"""What each training takes: defaults, bounds, and what the help of `hf-spec train` says of them."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from hf_spec.common.errors import OptionError
from hf_spec.methods.falcon.shapes import FalconShape, Mode
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight, Within

FROZEN_BASE = ("gated", "embeddings")
# Of the infilling format: prefix, suffix and middle.
NUM_MARKERS = 3
# Prompts that are answered at once.
BATCH_SIZE = 128


@dataclass(frozen=True)
class ResponseSettings(Settings):
    """How answers are made; stored as the first line of the file.

    Attributes:
        max_new_tokens: longest answer, in tokens.
        max_prompt_tokens: longest prompt, in tokens; longer ones are left out, and counted.
        temperature: 0 is greedy.
        seed: of sampled answers.
    """

    max_new_tokens: Count = 160
    max_prompt_tokens: Count = 512
    temperature: Weight = 0.0
    seed: int = 0


@dataclass(frozen=True)
class TrainSettings(Settings):
    """How a training runs.

    Attributes:
        epochs: passes over the answers.
        batch_tokens: tokens of a micro-batch, padding included.
        accumulate: micro-batches of a step, over all processes.
        learning_rate: highest; rises over the first steps, falls to a tenth.
        warm_up: share of the steps over which the rate rises.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        seed: of the order and of every random number.
        evaluate_every: steps between two looks at the answers held back.
        save_every: steps between two checkpoints.
    """

    epochs: Count = 3
    batch_tokens: Count = 2048
    accumulate: Count = 1
    learning_rate: Weight = 1e-3
    warm_up: Share = 0.03
    weight_decay: Internal[Weight] = 0.0
    clip: Internal[Weight] = 1.0
    seed: int = 0
    evaluate_every: Count = 300
    save_every: Internal[Count] = 100

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of a step counted from 0: a rise, then a cosine down to a tenth."""
        rising = max(1, round(self.warm_up * num_steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        progress = (step - rising) / max(1, num_steps - rising)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


# How each method trains where nothing else is said.
DRAFT_RUN = TrainSettings(learning_rate=2e-3)
EAGLE_RUN = TrainSettings(epochs=4)
FALCON_RUN = TrainSettings(epochs=8, learning_rate=2e-3)
# 400 of 2,000 steps in the paper (section 3.2).
SDSAT_RUN = TrainSettings(warm_up=0.2)


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


@dataclass(frozen=True)
class CsgdSettings(Settings):
    """What a Falcon head is taught; `hf_spec.methods.falcon.csgd` explains the choices.

    Attributes:
        schedule: of the share of glanced inputs; steps lets it fall to 0 within any number of
            epochs, off replaces none. See hf_spec.methods.falcon.csgd.
        noise: on the input features; see hf_spec.methods.falcon.csgd.
        hard_label: the token in the data, or one drawn from the target.
        replaced_token: put in by glancing: the target's first choice, or the token in the data.
        feature_weight: of the feature loss, a smooth L1 distance.
        soft_weight: of the cross-entropy with the target's distribution.
        hard_weight: of the cross-entropy with the one right token.
        soft_temperature: of the head's scores in the soft loss; in the released code 0.95.
        own_features: share of the blocks fed with features that the head itself predicted.
        own_passes: passes in a row that predict them, each from those of the one before it.
        feature_scale: features are compared as they are (raw), or each dimension in units of its
            root mean square.
        learn_replaced: learn from replaced places, too, which were given their own answers.
    """

    schedule: Annotated[Literal["paper", "released", "steps", "off"], Named("csgd")] = "paper"
    noise: Literal["paper", "released", "off"] = "paper"
    hard_label: Literal["token", "gumbel"] = "token"
    replaced_token: Literal["teacher", "data"] = "teacher"
    feature_weight: Weight = 1.0
    soft_weight: Weight = 0.09
    hard_weight: Weight = 0.01
    soft_temperature: Weight = 1.0
    own_features: Share = 0.0
    own_passes: Count = 1
    feature_scale: Literal["raw", "dimension"] = "raw"
    learn_replaced: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.soft_temperature == 0:
            raise OptionError(f"soft_temperature={self.soft_temperature!r} must be positive")

    def share(self, epoch: int, num_epochs: int, done: float = 0.0) -> float:
        """Lambda in an epoch counted from 0, of a run that has done such a share of its steps."""
        left = (num_epochs - epoch) / num_epochs
        by_step = 0.4 * (1 - done)
        shares = {"paper": 0.4 * left, "released": 0.35 * left + 0.1, "steps": by_step, "off": 0.0}
        return shares[self.schedule]


@dataclass(frozen=True)
class FalconTrainSettings(Settings):
    """What a Falcon head is trained to be.

    Attributes:
        shape: shape of the head.
        csgd: what it is taught.
        vocabulary_size: most frequent tokens that it can propose; None for all.
        keep_vocabulary: propose the tokens of the head to go on from, whatever these answers have.
        max_context: last tokens of a prompt that are read in training; None for all.
        max_depth: tokens that one draft may have, written into the adapter.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
    """

    shape: FalconShape = field(default_factory=FalconShape)
    csgd: CsgdSettings = field(default_factory=CsgdSettings)
    vocabulary_size: Annotated[Count | None, Named("vocabulary")] = 8192
    keep_vocabulary: bool = False
    max_context: Count | None = 64
    max_depth: Internal[Count] = 8
    held_back: Internal[Share] = 0.03


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


@dataclass(frozen=True)
class SdsatTrainSettings(Settings):
    """What adaptive tokens are trained to be; `hf_spec.methods.sdsat.training` explains the choices.

    Attributes:
        mode: what learns; see hf_spec.methods.sdsat.adaptive_tokens.
        window: most adaptive tokens in a row, L.
        diverse: one adaptive token per place, not one for all.
        rank: rank of the LoRA.
        targets: layers that get a LoRA, such as q_proj; all linear ones by default.
        loss: equation 9 of the paper (improved), or equation 8 (basic).
        layout: windows branch off the clean text, or replace tokens in it; chosen by mode and loss
            by default.
        start_share: of the answer's positions, where windows start.
        adaptive_weight: of the adaptive positions beside the clean text, w of equation 9.
        soft_weight: share of the cross-entropy with the target's own distribution.
        infilling: share of the code put into infilling format, one half PSM and one half SPM; 0.5
            in the paper.
        infilling_task: which answers are code.
        infilling_markers: prefix, suffix and middle marker, tokens of the vocabulary; by default
            the tokenizer's own.
        num_adaptive: adaptive tokens that decoding takes if it is told none; the window by default.
        token_ids: spare rows of the vocabulary, for mode full; new ones are appended by default.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
        evaluated_positions: per held-back answer, after which adaptive tokens are tried.
    """

    mode: Mode = "gated"
    window: Count = 5
    diverse: bool = False
    rank: Count = 16
    targets: Annotated[tuple[str, ...], Named("lora_layer")] = ()
    loss: Literal["improved", "basic"] = "improved"
    layout: Literal["branches", "replaced"] | None = None
    start_share: Share = 0.1
    adaptive_weight: Weight = 1.0
    soft_weight: Share = 0.0
    infilling: Share = 0.0
    infilling_task: str = "code"
    infilling_markers: Annotated[tuple[str, ...], Named("infilling_marker")] = ()
    num_adaptive: Count | None = None
    token_ids: Annotated[tuple[int, ...], Named("token_id"), Within(0)] = ()
    held_back: Internal[Share] = 0.03
    evaluated_positions: Internal[Count] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen_layout == "branches" and (self.loss == "basic" or not self.frozen):
            raise OptionError(
                f"layout='branches' keeps the text clean, which loss={self.loss!r} in mode "
                f"{self.mode!r} cannot use; choose layout='replaced'"
            )
        if self.token_ids and len(self.token_ids) != self.num_kinds:
            raise OptionError(
                f"token_ids={self.token_ids}: {self.num_kinds} adaptive tokens are needed"
            )
        if self.infilling_markers and len(set(self.infilling_markers)) != NUM_MARKERS:
            raise OptionError(
                f"infilling_markers={self.infilling_markers}: {NUM_MARKERS} different tokens are "
                "needed, for prefix, suffix and middle"
            )

    @property
    def frozen(self) -> bool:
        """Whether the base keeps its weights and its output."""
        return self.mode in FROZEN_BASE

    @property
    def chosen_layout(self) -> str:
        """The layout, the default one if none was named."""
        usual = "branches" if self.frozen and self.loss == "improved" else "replaced"
        return self.layout or usual

    @property
    def num_kinds(self) -> int:
        """How many different adaptive tokens there are."""
        return self.window if self.diverse else 1


@dataclass(frozen=True)
class DiscoTrainSettings(Settings):
    """What DISCO's classifier learns and how.

    Attributes:
        labels: whether the tokens agree (hard), or the probability of acceptance (soft).
        hidden_size: of the classifier.
        class_weights: weigh accepted tokens so that both classes count the same.
        validation_share: share of the prompts held back, drawn with `seed`.
        learning_rate, weight_decay: of AdamW.
        batch_size: positions.
        max_epochs: most passes over the data.
        patience: epochs without a lower validation loss after which training ends.
        seed: of the split, the first weights and the order of the data.
        threshold, max_draft_tokens: what the adapter says until it is calibrated.
    """

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
