"""Settings that all trainings share, and descriptions of trainings.

`hf-spec train NAME` is built from a description, `TRAINING` in the `settings.py` of a method.
"""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight

# Prompts per batch of `hf-spec train responses`.
BATCH_SIZE = 128
# Panel of the model, the answers and what is computed from them, in a help text.
DATA = "Model and data"


@dataclass(frozen=True)
class ResponseSettings(Settings):
    """Settings of answers; stored as the first line of their file.

    Attributes:
        max_new_tokens: maximum new tokens of an answer.
        max_prompt_tokens: maximum tokens of a prompt. Longer ones are skipped and counted.
        temperature: sampling temperature; 0 is greedy.
        seed: random seed of sampled answers.
    """

    panel = "Generation"

    max_new_tokens: Count = 160
    max_prompt_tokens: Count = 512
    temperature: Weight = 0.0
    seed: int = 0


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Settings of the shared training loop.

    Attributes:
        epochs: passes over the answers.
        batch_tokens: tokens per micro-batch. Padding is included.
        accumulate: micro-batches per step. Those of all processes count.
        learning_rate: peak learning rate. It rises over the first steps and falls to a tenth. None
            is for trainings with a default by mode.
        warm_up: share of warm-up steps. The rate rises in them.
        weight_decay: weight decay of AdamW.
        clip: maximum norm of the gradient.
        seed: random seed. It fixes the order of the data and every random number.
        evaluate_every: steps between evaluations. They use the held-out answers.
        save_every: steps between checkpoints.
        log_with: tracker of the metrics. They are in metrics.jsonl, too; its package must be
            installed.
    """

    panel = "Training"

    epochs: Annotated[Count, Named("num_train_epochs")] = 3
    batch_tokens: Count = 2048
    accumulate: Annotated[Count, Named("gradient_accumulation_steps")] = 1
    learning_rate: Weight | None = 1e-3
    warm_up: Annotated[Share, Named("warmup_ratio")] = 0.03
    weight_decay: Internal[Weight] = 0.0
    clip: Internal[Weight] = 1.0
    seed: int = 0
    evaluate_every: Annotated[Count, Named("eval_steps")] = 300
    save_every: Internal[Count] = 100
    log_with: Literal["tensorboard", "wandb"] | None = None

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that the result depends on, for checkpoints and the records of adapters."""
        return {name: value for name, value in asdict(self).items() if name != "log_with"}

    @property
    def peak_rate(self) -> float:
        """The peak learning rate; raises `OptionError` without one."""
        if self.learning_rate is None:
            raise OptionError("learning_rate=None: this training has no default; choose a number")
        return self.learning_rate

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step, from 0: linear warm-up, then cosine to a tenth."""
        rising = max(1, round(self.warm_up * num_steps))
        if step < rising:
            return self.peak_rate * (step + 1) / rising
        progress = (step - rising) / max(1, num_steps - rising)
        return self.peak_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class HeadSettings(Settings):
    """Settings that all trainings of heads share.

    Attributes:
        max_context: last prompt tokens to learn; None for all.
        held_back: share of the prompts that are held out, chosen by a hash of their ids.
    """

    panel = "Head"

    max_context: Count | None = 64
    held_back: Internal[Share] = 0.03


@dataclass(frozen=True, kw_only=True)
class DraftVocabularySettings(HeadSettings):
    """Settings of heads that can draft a part of the vocabulary.

    Attributes:
        vocabulary_size: frequent tokens it can draft; None for all.
    """

    vocabulary_size: Annotated[Count | None, Named("vocab_size")] = 8192


@dataclass(frozen=True)
class TeacherOptions(Settings):
    """Storage of the target's next-token distributions.

    Attributes:
        teacher: target distributions. Default: beside the answers.
    """

    panel = DATA

    teacher: Path | None = None


@dataclass(frozen=True)
class FeatureOptions(Settings):
    """Storage of the target's features.

    Attributes:
        features: folder of target features. Default: beside the answers.
        store: store the features on disk. Otherwise they are computed in every step.
    """

    panel = DATA

    features: Path | None = None
    store: bool = True


@dataclass(frozen=True)
class StartOptions(Settings):
    """Starting point of a head.

    Attributes:
        init: head to start from, folder or Hub id. Its sizes must agree.
    """

    panel = DATA

    init: str | None = None


@dataclass(frozen=True)
class Training:
    """A training that `hf-spec train NAME` runs.

    Attributes:
        name: name of the command.
        help: help text of the command.
        settings: class of the method's settings.
        function: "module:function" of the training; takes a `TrainingJob`, returns a
            `TrainingResult`.
        result: what the training writes, for the help of --out.
        strategy: strategy of the `hf-spec bench` command that is suggested at the end.
        run: defaults of the shared training loop; None if the method has its own loop.
        teacher: True if it reads the target's next-token distributions.
        features: hidden states of the target that it reads: "last", the last ones; "fused", those
            of several layers; None if it reads none.
        options: further options of the command.
        several_files: True if --responses may be repeated.
        online: "module:function" of the training beside the target; takes target and assistant,
            returns an `OnlineTraining`. None if there is none.
    """

    name: str
    help: str
    settings: type[Settings]
    function: str
    result: str
    strategy: str
    run: TrainSettings | None = None
    teacher: bool = False
    features: Literal["last", "fused"] | None = None
    options: type[Settings] | None = None
    several_files: bool = True
    online: str | None = None

    @property
    def data_options(self) -> type[Settings] | None:
        """Options of the data that is computed from the answers and cached beside them."""
        if self.features is not None:
            return FeatureOptions
        return TeacherOptions if self.teacher else None
