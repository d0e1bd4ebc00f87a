"""Training of heads that draft by reading their own output: EAGLE-3 and MTP modules.

From the second draft step on, the head's own output replaces the feature that only the target could
compute. Training unrolls several such steps, so that later draft tokens stay accurate
("training-time test", Li et al. 2025, arXiv 2503.01840, section 3.2)::

    loss = sum_s w_s CE(target distribution over the R draft tokens, head after s steps)
    w_s  = step_weight^s / sum_s step_weight^s
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_spec.common.compat import CACHE_NAME
from hf_spec.methods.feature_pairs.draft_head import PairHead
from hf_spec.methods.feature_pairs.teacher import Teacher, cross_entropy
from hf_spec.training.features import LAST, Text
from hf_spec.training.heads import falling_weights
from hf_spec.training.pairs import Pairs, read_pairs
from hf_spec.training.trainer import MicroBatch


class StepsLoss:
    """Loss of a head over several draft steps, with a frozen target as the teacher.

    `settings` has `steps`, `step_weight`, and `max_context`.
    """

    def __init__(self, head: PairHead, target: PreTrainedModel, settings: Any):
        self.head, self.target, self.settings = head, target, settings
        self.teacher = Teacher(target, head.head.vocabulary)
        # The last state is the teacher's; a head may read it, too.
        reads_last = head.hidden_layers == LAST
        self.layers = LAST if reads_last else (*head.hidden_layers, *LAST)
        self._num_read = len(head.hidden_layers)

    def __call__(self, batch: MicroBatch[Text]) -> tuple[Tensor, int]:
        """Return the loss summed over the learned positions, and their number."""
        pairs = read_pairs(self.target, batch.items, 1, self.settings.max_context, self.layers)
        target_probs = self.teacher.probs_at(pairs, pairs.rows, pairs.positions)
        weights = falling_weights(self.settings.step_weight, self.settings.steps)
        total = torch.zeros((), device=target_probs.device)
        for step, outputs in enumerate(self._steps(pairs)):
            # Positions before `step` have no draft of that depth.
            deep = pairs.positions >= step
            with self.teacher.autocast():
                logits = self.head.head.draft_logits(
                    outputs[pairs.rows[deep], pairs.positions[deep]]
                )
            total = total + cross_entropy(logits, target_probs[deep]).sum() * weights[step]
        return total, len(target_probs)

    @torch.no_grad()
    def matches(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return per text (answer tokens, steps) bool: which tokens of greedy drafts are correct.

        Row n is the draft whose first token is answer token n. Each step reads the text's tokens,
        which equal the draft's as long as it is correct. Tokens past the text count as wrong.
        """
        pairs = read_pairs(self.target, texts, 1, None, self.layers)
        answers = pairs.tokens[pairs.rows, pairs.positions + 1]
        size = (len(texts), pairs.tokens.shape[1] + self.settings.steps, self.settings.steps)
        correct = torch.zeros(size, dtype=torch.bool, device=answers.device)
        for step, outputs in enumerate(self._steps(pairs)):
            with self.teacher.autocast():
                logits = self.head.head.draft_logits(outputs[pairs.rows, pairs.positions])
            hit = self.head.head.tokens(logits.argmax(dim=-1)) == answers
            # The draft with this token as number `step` began `step` positions earlier.
            deep = pairs.positions >= step
            correct[pairs.rows[deep], pairs.positions[deep] - step, step] = hit[deep]
        return [correct[row, first:stop].cpu() for row, (first, stop) in enumerate(pairs.span)]

    def _steps(self, pairs: Pairs) -> Iterator[Tensor]:
        """Yield the (B, T, h) outputs of each step of `draft_steps`."""
        states = pairs.features.chunk(len(self.layers), dim=-1)[: self._num_read]
        with self.teacher.autocast():
            features = self.head.fuse(states)
        steps = draft_steps(self.head, pairs.tokens, features, self.settings.steps)
        for _ in range(self.settings.steps):
            with self.teacher.autocast():
                outputs = next(steps)
            yield outputs


def draft_steps(
    head: PairHead, tokens: Tensor, features: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Run the draft steps from every position of whole texts at once; yield (B, T, h) outputs.

    In step s, position i is the s-th draft pair after the true pairs 0 to i - s. Its feature is the
    output of step s - 1 at position i - 1. It sees the true pairs and its own draft ancestors, one
    per earlier step. The inputs are (B, T) int64 t_{i+1}, and (B, T, h) from `PairHead.fuse`.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    back = positions[:, None] - positions
    cache = DynamicCache()
    for step in range(num_steps):
        # The cache holds the keys of step 0 (true pairs), then those of each later step.
        seen = [back >= step, *(back == step - earlier for earlier in range(1, step + 1))]
        mixed, _ = head.mix(tokens, features)
        outputs = head.attend(
            mixed,
            attention_mask=torch.cat(seen, dim=-1)[None, None],
            position_ids=positions[None],
            **{CACHE_NAME: cache},
        )
        yield outputs
        features = torch.cat([features[:, :1], outputs[:, :-1].to(features.dtype)], dim=1)
