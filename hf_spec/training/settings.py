"""Settings that all trainings share: how answers are generated and how a training runs."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight

# Prompts per batch of `hf-spec train responses`.
BATCH_SIZE = 128


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
        learning_rate: peak learning rate. It rises over the first steps and falls to a tenth.
        warm_up: share of warm-up steps. The rate rises in them.
        weight_decay: weight decay of AdamW.
        clip: maximum norm of the gradient.
        seed: random seed. It fixes the order of the data and every random number.
        evaluate_every: steps between evaluations. They use the held-out answers.
        save_every: steps between checkpoints.
    """

    panel = "Training"

    epochs: Annotated[Count, Named("num_train_epochs")] = 3
    batch_tokens: Count = 2048
    accumulate: Annotated[Count, Named("gradient_accumulation_steps")] = 1
    learning_rate: Weight = 1e-3
    warm_up: Annotated[Share, Named("warmup_ratio")] = 0.03
    weight_decay: Internal[Weight] = 0.0
    clip: Internal[Weight] = 1.0
    seed: int = 0
    evaluate_every: Annotated[Count, Named("eval_steps")] = 300
    save_every: Internal[Count] = 100

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step, from 0: linear warm-up, then cosine to a tenth."""
        rising = max(1, round(self.warm_up * num_steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        progress = (step - rising) / max(1, num_steps - rising)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
