"""Coupled sequential glancing distillation (CSGD), the training loss of a Falcon head.

Gao et al. 2024, arXiv 2412.12639, section 3.2. Two passes:

1. The first, without gradient, counts the positions of an answer at which the head's first choice
   differs from the target's: the Hamming distance d.
2. N = lambda * d input pairs are replaced by the answers of these positions, in runs from the start
   of a block, so that the positions after them learn to use what a left-to-right drafter would have
   read. The second pass predicts from these inputs, and the loss is computed on it.

Pair i is (t_{i+1}, h_i). Replacing it puts pair i + k in its place, feature and token together.

Paper and released code differ. Each choice is an option (`CsgdSettings`), by default the paper's:

- `schedule`, lambda in epoch e of E, counted from 0: "paper" is 0.4 (E - e) / E, "released" is
  0.35 (E - e) / E + 0.10. Over few epochs neither falls far, so "steps", ours, is 0.4 times the
  share of the remaining steps.
- `replaced_token`: the target's first choice ("teacher", the paper) or the token of the data
  ("data", the code). Greedy answers make both the same.
- `noise` on the input features: "paper" U(-0.1, 0.1), "released" that times 512 / length. Both
  assume features of about one, so both are scaled by the root mean square of the target's features.
- `hard_label`: "token" of the data, or "gumbel", drawn from the target.
- `soft_temperature`: 1 in the paper; the code divides the head's logits by 0.95.
- `learn_replaced`: both learn from replaced positions. False leaves them out, because their inputs
  contain their answers.
- the weights: 1 for features, 0.1 * 0.9 for the soft label, 0.1 * 0.1 for the hard one (equations 2
  to 5 and 8).

Ours, and off by default: `learn_prompts`, which also learns at the positions of prompts;
`own_features`, the share of blocks whose input features are predicted by the head, as in the deeper
passes of a draft (like HASS, Zhang et al. 2024, arXiv 2408.15766); and `own_passes`, the number of
passes that predict them, each from those of the pass before.

With k = 2 there are N runs of one pair. For larger k there are N // k runs of 1 to k - 1 pairs, as
in the code. The code's blocks begin at the first answer token and those of its mask at multiples of
k; here both use the same grid. With k = 1 nothing is replaced.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hf_spec_kernels import DistillWeights, distill_loss, serves
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.methods.falcon.head import FalconHead
from hf_spec.methods.falcon.settings import CsgdSettings
from hf_spec.training.features import Text
from hf_spec.training.pairs import Pairs, read_pairs
from hf_spec.training.trainer import MicroBatch, mixed_precision

NOISE_LENGTH = 512


class GlancingLoss:
    """The CSGD loss of a head in training mode on micro-batches, with a frozen target.

    `feature_size` is the root mean square of the target's features. At most `max_context` tokens
    of a prompt are read.
    """

    def __init__(
        self,
        head: FalconHead,
        target: PreTrainedModel,
        settings: CsgdSettings,
        num_epochs: int,
        feature_size: float,
        max_context: int | None = None,
    ):
        self.head, self.target, self.settings = head, target, settings
        self.num_epochs, self.max_context = num_epochs, max_context
        self.noise_size = 0.1 * feature_size
        self.index_of = head.head.indices().to(target.device)

    def __call__(self, batch: MicroBatch[Text]) -> tuple[Tensor, int]:
        """Return the loss summed over the learned positions, and their number."""
        torch.manual_seed(batch.seed)
        k = self.head.shape.block_size
        grid = int(torch.randint(k, ()))
        layers = self.head.hidden_layers
        prompts = self.settings.learn_prompts
        pairs = read_pairs(self.target, batch.items, k, self.max_context, layers, prompts)
        states = pairs.features.split(self.head.hidden_size, dim=-1)
        truth = states[-1][pairs.rows, pairs.positions + k]
        # One region per pass: the second must not reuse weights that were cast without gradient.
        with mixed_precision(self.target):
            pairs = replace(pairs, features=self.head.fuse(states))
        with torch.no_grad(), mixed_precision(self.target):
            scores = self.head.head.draft_logits(truth.to(self.target.dtype)).float()
        tokens, features = pairs.tokens, self._noisy(pairs)
        share = self.settings.share(batch.epoch, self.num_epochs, batch.done)
        learned = torch.ones_like(pairs.positions, dtype=torch.bool)
        glances = share > 0 and k > 1
        if glances or self.settings.own_features:
            with torch.no_grad(), mixed_precision(self.target):
                first = self.head(tokens, features, grid)
            features = self._with_own(tokens, features, first, grid)
        if glances:
            with torch.no_grad():
                _, logits = self._read(first, pairs)
            wrong = logits.argmax(dim=-1) != scores.argmax(dim=-1)
            chosen = self._choose(wrong, pairs, share, grid)
            tokens, features = self._replace(tokens, features, pairs, chosen, scores)
            if not self.settings.learn_replaced:
                learned = ~chosen
        with mixed_precision(self.target):
            second = self.head(tokens, features, grid)
        predicted, logits = self._read(second, pairs)
        answers = pairs.tokens[pairs.rows, pairs.positions + k]
        parts = [part[learned] for part in (predicted, truth, logits, scores, answers)]
        return self._distance(*parts), len(parts[-1])

    def _read(self, outputs: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return (M, H) features and (M, R) logits at the learned positions."""
        with mixed_precision(self.target):
            predicted = outputs[pairs.rows, pairs.positions]
            return predicted, self.head.head.draft_logits(predicted)

    def _noisy(self, pairs: Pairs) -> Tensor:
        """Return the input features with noise, scaled per text if it depends on the length."""
        features = pairs.features
        if self.settings.noise == "off":
            return features
        noise = torch.empty_like(features).uniform_(-self.noise_size, self.noise_size)
        if self.settings.noise == "released":
            stops = [stop + self.head.shape.block_size for _, stop in pairs.span]
            lengths = torch.tensor(stops, device=noise.device, dtype=noise.dtype)
            noise *= NOISE_LENGTH / lengths[:, None, None]
        return features + noise

    def _with_own(self, tokens: Tensor, features: Tensor, predicted: Tensor, grid: int) -> Tensor:
        """Return the input features, in some blocks those predicted by the block before."""
        k, share = self.head.shape.block_size, self.settings.own_features
        if not share:
            return features
        batch, length = features.shape[:2]
        block = torch.arange(length).add(k - grid).div(k, rounding_mode="floor")
        replaced = (torch.rand(batch, int(block[-1]) + 1) < share)[:, block]
        replaced[:, :k] = False
        replaced = replaced[..., None].to(features.device)
        mixed = features
        for done in range(self.settings.own_passes):
            if done:
                with torch.no_grad(), mixed_precision(self.target):
                    predicted = self.head(tokens, mixed, grid)
            earlier = F.pad(predicted, (0, 0, k, 0))[:, :length]
            mixed = torch.where(replaced, earlier.to(features.dtype), features)
        return mixed

    def _choose(self, wrong: Tensor, pairs: Pairs, share: float, grid: int) -> Tensor:
        """Return (M,) bool, True for the learned positions whose inputs are replaced."""
        parts = []
        for errors, (first, stop) in zip(wrong.cpu().split(pairs.counts), pairs.span, strict=True):
            part = torch.zeros(len(errors), dtype=torch.bool)
            count = int(share * int(errors.sum()))
            positions = replaced_positions(first, stop, count, self.head.shape.block_size, grid)
            part[[position - first for position in positions]] = True
            parts.append(part)
        return torch.cat(parts).to(wrong.device)

    def _replace(
        self, tokens: Tensor, features: Tensor, pairs: Pairs, chosen: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return copies of the inputs with pair i + k at every chosen position i."""
        rows, positions = pairs.rows[chosen], pairs.positions[chosen]
        later = positions + self.head.shape.block_size
        put_in = pairs.tokens[rows, later]
        if self.settings.replaced_token == "teacher":
            put_in = self.head.head.tokens(scores[chosen].argmax(dim=-1))
        tokens, features = tokens.clone(), features.clone()
        tokens[rows, positions] = put_in
        features[rows, positions] = pairs.features[rows, later]
        return tokens, features

    def _distance(
        self, predicted: Tensor, truth: Tensor, logits: Tensor, scores: Tensor, answers: Tensor
    ) -> Tensor:
        """Return the weighted losses, summed over positions."""
        settings, logits = self.settings, logits.float()
        near = F.smooth_l1_loss(predicted.float(), truth.float(), reduction="sum")
        loss = settings.feature_weight * near / predicted.shape[-1]
        labels = self.index_of[answers]
        if settings.hard_label == "gumbel":
            gumbel = -torch.empty_like(scores).exponential_().log()
            labels = (scores + gumbel).argmax(dim=-1)
        if serves(logits):
            weights = DistillWeights(
                settings.soft_weight, settings.hard_weight, settings.soft_temperature
            )
            return loss + distill_loss(logits, scores, labels, weights)
        # One weight per token for both labels, because (M, R) tensors take most of a step's time.
        # Labels outside the vocabulary get no weight.
        soft = scores.softmax(dim=-1).mul_(settings.soft_weight)
        hard = torch.zeros_like(soft) if settings.soft_temperature != 1.0 else soft
        weight = settings.hard_weight * (labels >= 0)
        hard.scatter_add_(1, labels.clamp_min(0)[:, None], weight[:, None].to(hard))
        loss = loss + F.cross_entropy(logits, hard, reduction="sum")
        if hard is not soft:
            softer = logits / settings.soft_temperature
            loss = loss + F.cross_entropy(softer, soft, reduction="sum")
        return loss


def replaced_positions(first: int, stop: int, count: int, block_size: int, grid: int) -> list[int]:
    """Return the positions in [first, stop) to replace: runs from the start of a block.

    They leave out the last position of the block. About `count` are replaced; with k > 2 there are
    count // k runs. A block begins at `grid`.
    """
    longest = block_size - 1
    begin = first + (grid - first) % block_size
    starts = range(begin, stop - longest + 1, block_size)
    num_runs = min(len(starts), count if block_size == 2 else count // block_size)
    if longest < 1 or num_runs < 1:
        return []
    chosen = torch.randperm(len(starts))[:num_runs].tolist()
    lengths = torch.randint(1, longest + 1, (num_runs,)).tolist()
    return [
        starts[start] + offset
        for start, length in zip(chosen, lengths, strict=True)
        for offset in range(length)
    ]
