"""Coupled sequential glancing distillation, the losses of a Falcon head.

Two passes (Gao et al. 2024, arXiv 2412.12639, section 3.2). The first, without gradient, counts at
how many places of an answer the head's first choice differs from the target's: the distance d. Then
N = lambda * d inputs are replaced by what the head is to predict there, in runs at the start of a
block, so that the places after them learn to use what a left-to-right drafter would have had. The
second pass predicts from these inputs and is what the head learns from.

With pair i = (t_{i+1}, h_i), replacing i puts pair i + k in its place: feature and token together.

Paper and released code differ; each choice is a named option, the paper's the default:

- lambda, with epoch e of E counted in whole epochs from 0: "paper" 0.4 (E - e) / E, "released"
  0.35 (E - e) / E + 0.10. Within few epochs neither falls far, so "steps", ours, is 0.4 times the
  share of the steps to come.
- the token put in: the paper's is the target's ("teacher", its first choice), the code's that of
  the data ("data"). Under greedy answers they are the same.
- noise on the input features: "paper" U(-0.1, 0.1), "released" that times 512 / length. Both are
  meant for features of size one, so both are scaled by the root mean square of the target's own.
- the hard label: "token", the one in the data, or "gumbel", one drawn from the target.
- the soft label: the paper's divergence (temperature 1), the code's with the head's scores at 0.95.
- whether places that were replaced are learned from, as in both; `learn_replaced=False` leaves
  them out, for they were given their own answers.
- the weights: 1 for features, 0.1 * 0.9 for the soft label, 0.1 * 0.1 for the hard one.

Ours, and off by default: `own_features`, a share of the blocks whose input features are what the
head predicted in the first pass, as in the deeper passes of a draft (in the spirit of HASS, Zhang
et al. 2024, arXiv 2408.15766); `own_passes`, so many passes, each of which reads what the one
before it predicted; `feature_scale` "dimension", which divides each dimension by its own root mean
square, where a few large ones dominate otherwise.

For k = 2 there are N runs of one pair. For longer blocks there are N // k runs of 1 to k - 1 pairs,
as in the code. Its blocks begin at the first answer token, those of its mask at multiples of k;
here both lie on the grid in use. With k = 1 a block has no inside to be taught, and nothing is
replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hf_spec_kernels import DistillWeights, distill_loss, serves
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.methods.falcon.head import FalconHead
from hf_spec.methods.falcon.settings import CsgdSettings
from hf_spec.training.features import LAST, Text, text_features
from hf_spec.training.precision import mixed_precision
from hf_spec.training.responses import Response
from hf_spec.training.trainer import MicroBatch

NOISE_LENGTH = 512


@dataclass(frozen=True)
class Pairs:
    """Texts as a head reads them, padded on the right, with the M places it learns from.

    Output i predicts pair i + k, so true feature and token of place i are those of pair i + k.
    Padding never matters: the answer to a learned place lies after its whole block.

    Attributes:
        tokens: (B, T) int64, t_{i+1}.
        features: (B, T, n * H) in the dtype they were stored in, h_i of n layers.
        span: per text the first learned place and the one after the last.
    """

    tokens: Tensor
    features: Tensor
    span: list[tuple[int, int]]

    @property
    def counts(self) -> list[int]:
        """How many learned places each text has."""
        return [stop - first for first, stop in self.span]

    @cached_property
    def rows(self) -> Tensor:
        """(M,) int64: the text of each learned place, text by text."""
        rows = torch.arange(len(self.span)).repeat_interleave(torch.tensor(self.counts))
        return rows.to(self.tokens.device)

    @cached_property
    def places(self) -> Tensor:
        """(M,) int64: the learned places themselves."""
        places = torch.cat([torch.arange(first, stop) for first, stop in self.span])
        return places.to(self.tokens.device)


def cut_prompt(response: Response, max_context: int | None) -> int:
    """How many tokens of a prompt are left out if it may have `max_context`; None for all."""
    return 0 if max_context is None else max(0, len(response.prompt) - max_context)


def read_pairs(
    target: PreTrainedModel,
    texts: Sequence[Text],
    block_size: int,
    max_context: int | None = None,
    layers: Sequence[int] = LAST,
) -> Pairs:
    """Put texts together; a learned place is one whose token t_{i+k+1} belongs to the answer.

    Features that texts come without are those of `layers` of `target`; k is `block_size`.
    """
    known = [text.features for text in texts]
    if any(features is None for features in known):
        known = list(text_features(target, [text.response for text in texts], layers))
    lines, states, span = [], [], []
    for text, features in zip(texts, known, strict=True):
        response = text.response
        cut = cut_prompt(response, max_context)
        line = [*response.prompt, *response.response][cut + 1 :]
        first = max(0, len(response.prompt) - cut - 1 - block_size)
        lines.append(torch.tensor(line))
        assert features is not None
        states.append(features[cut:])
        span.append((first, max(first, len(line) - block_size)))
    padded = (nn.utils.rnn.pad_sequence(one, batch_first=True) for one in (lines, states))
    tokens, inputs = (one.to(target.device) for one in padded)
    return Pairs(tokens, inputs, span)


class GlancingLoss:
    """The loss on micro-batches of a head in training mode, with a frozen target.

    `sizes` is the (H,) root mean square of each dimension of the target's features.
    """

    def __init__(
        self,
        head: FalconHead,
        target: PreTrainedModel,
        settings: CsgdSettings,
        num_epochs: int,
        sizes: Tensor,
        max_context: int | None = None,
    ):
        self.head, self.target, self.settings = head, target, settings
        self.num_epochs, self.max_context = num_epochs, max_context
        self.sizes = sizes.float().to(target.device)
        self.noise_size = 0.1 * float(self.sizes.square().mean().sqrt())
        self.place_of = head.head.places().to(target.device)

    def __call__(self, batch: MicroBatch[Text]) -> tuple[Tensor, int]:
        """The loss summed over the places it is taken of, and their number."""
        torch.manual_seed(batch.seed)
        k = self.head.shape.block_size
        grid = int(torch.randint(k, ()))
        layers = self.head.hidden_layers
        pairs = read_pairs(self.target, batch.items, k, self.max_context, layers)
        states = pairs.features.split(self.head.hidden_size, dim=-1)
        truth = states[-1][pairs.rows, pairs.places + k]
        with self._autocast():
            pairs = replace(pairs, features=self.head.fuse(states))
        with torch.no_grad(), self._autocast():
            scores = self.head.head.draft_logits(truth.to(self.target.dtype)).float()
        tokens, features = pairs.tokens, self._noisy(pairs)
        share = self.settings.share(batch.epoch, self.num_epochs, batch.done)
        learned = torch.ones_like(pairs.places, dtype=torch.bool)
        glances = share > 0 and k > 1
        if glances or self.settings.own_features:
            with torch.no_grad(), self._autocast():
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
        with self._autocast():
            second = self.head(tokens, features, grid)
        predicted, logits = self._read(second, pairs)
        answers = pairs.tokens[pairs.rows, pairs.places + k]
        parts = [part[learned] for part in (predicted, truth, logits, scores, answers)]
        return self._distance(*parts), len(parts[-1])

    def _read(self, outputs: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """(M, H) features and (M, R) logits at the learned places."""
        with self._autocast():
            predicted = outputs[pairs.rows, pairs.places]
            return predicted, self.head.head.draft_logits(predicted)

    def _autocast(self) -> torch.autocast:
        # One region a pass: casts of weights made without gradient must not serve the second.
        return mixed_precision(self.target)

    def _noisy(self, pairs: Pairs) -> Tensor:
        """Input features with noise, each text's own if it depends on the length."""
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
        """The input features, in some blocks those that the block before predicted."""
        k, share = self.head.shape.block_size, self.settings.own_features
        if not share:
            return features
        batch, length = features.shape[:2]
        block = torch.arange(length).add(k - grid).div(k, rounding_mode="floor")
        own = (torch.rand(batch, int(block[-1]) + 1) < share)[:, block]
        own[:, :k] = False
        fed = own[..., None].to(features.device)
        mixed = features
        for done in range(self.settings.own_passes):
            if done:
                with torch.no_grad(), self._autocast():
                    predicted = self.head(tokens, mixed, grid)
            earlier = F.pad(predicted, (0, 0, k, 0))[:, :length]
            mixed = torch.where(fed, earlier.to(features.dtype), features)
        return mixed

    def _choose(self, wrong: Tensor, pairs: Pairs, share: float, grid: int) -> Tensor:
        """(M,) bool: the learned places whose inputs are replaced."""
        parts = []
        for mine, (first, stop) in zip(wrong.cpu().split(pairs.counts), pairs.span, strict=True):
            part = torch.zeros(len(mine), dtype=torch.bool)
            count = int(share * int(mine.sum()))
            found = replaced_places(first, stop, count, self.head.shape.block_size, grid)
            part[[place - first for place in found]] = True
            parts.append(part)
        return torch.cat(parts).to(wrong.device)

    def _replace(
        self, tokens: Tensor, features: Tensor, pairs: Pairs, chosen: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Copies of the inputs with pair i + k at every chosen place i."""
        rows, places = pairs.rows[chosen], pairs.places[chosen]
        later = places + self.head.shape.block_size
        put_in = pairs.tokens[rows, later]
        if self.settings.replaced_token == "teacher":
            put_in = self.head.head.tokens(scores[chosen].argmax(dim=-1))
        tokens, features = tokens.clone(), features.clone()
        tokens[rows, places] = put_in
        features[rows, places] = pairs.features[rows, later]
        return tokens, features

    def _distance(
        self, predicted: Tensor, truth: Tensor, logits: Tensor, scores: Tensor, answers: Tensor
    ) -> Tensor:
        """The weighted losses, summed over places."""
        settings, logits = self.settings, logits.float()
        if settings.feature_scale == "dimension":
            predicted, truth = predicted / self.sizes, truth / self.sizes
        near = F.smooth_l1_loss(predicted.float(), truth.float(), reduction="sum")
        loss = settings.feature_weight * near / predicted.shape[-1]
        labels = self.place_of[answers]
        if settings.hard_label == "gumbel":
            gumbel = -torch.empty_like(scores).exponential_().log()
            labels = (scores + gumbel).argmax(dim=-1)
        if serves(logits):
            weights = DistillWeights(
                settings.soft_weight, settings.hard_weight, settings.soft_temperature
            )
            return loss + distill_loss(logits, scores, labels, weights)
        # Both in one weight per token: a table of places by vocabulary is what a step spends most
        # of its time on. Labels outside the vocabulary weigh nothing.
        soft = scores.softmax(dim=-1).mul_(settings.soft_weight)
        hard = torch.zeros_like(soft) if settings.soft_temperature != 1.0 else soft
        weight = settings.hard_weight * (labels >= 0)
        hard.scatter_add_(1, labels.clamp_min(0)[:, None], weight[:, None].to(hard))
        loss = loss + F.cross_entropy(logits, hard, reduction="sum")
        if hard is not soft:
            softer = logits / settings.soft_temperature
            loss = loss + F.cross_entropy(softer, soft, reduction="sum")
        return loss


def replaced_places(first: int, stop: int, count: int, block_size: int, grid: int) -> list[int]:
    """Where inputs are replaced: runs from the start of a block that leave its last place alone.

    They lie in [first, stop), and blocks begin at `grid`. For k = 2 there are at most `count`
    places, for longer blocks count // k runs, drawn from torch's random numbers.
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
