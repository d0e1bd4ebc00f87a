"""Settings that all trainings share: how answers are generated and how a training runs."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_spec.common.settings import Count, Internal, Settings, Share, Weight

# Prompts per batch of `hf-spec train responses`.
BATCH_SIZE = 128


@dataclass(frozen=True)
class ResponseSettings(Settings):
    """Settings of answers; stored as the first line of their file.

    Attributes:
        max_new_tokens: longest answer, in tokens.
        max_prompt_tokens: longest prompt, in tokens; longer ones are skipped, and counted.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of sampled answers.
    """

    max_new_tokens: Count = 160
    max_prompt_tokens: Count = 512
    temperature: Weight = 0.0
    seed: int = 0


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Settings of the shared training loop.

    Attributes:
        epochs: passes over the answers.
        batch_tokens: tokens per micro-batch, padding included.
        accumulate: micro-batches per step, over all processes.
        learning_rate: peak learning rate; it rises over the first steps and falls to a tenth.
        warm_up: share of the steps over which the rate rises.
        weight_decay: weight decay of AdamW.
        clip: maximum norm of the gradient.
        seed: seed of the order and of every random number.
        evaluate_every: steps between evaluations on the held-out answers.
        save_every: steps between checkpoints.
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
        """Return the learning rate of a step, from 0: linear warm-up, then cosine to a tenth."""
        rising = max(1, round(self.warm_up * num_steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        progress = (step - rising) / max(1, num_steps - rising)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
