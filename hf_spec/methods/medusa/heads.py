"""Medusa heads and MLP speculators: what follows, read off the target's newest feature alone.

The feature is the hidden state after the target's final norm, of the newest token that it has run.
What the target itself says there is the root of the next draft, so these heads begin after it.

==================  ==============================================================================
Medusa              head i is a few residual blocks, x + silu(linear(x)), and a projection. It says
                    what stands i + 1 places after the root, whatever stands between (Cai et al.
                    2024, arXiv 2401.10774, section 2.1). Heads without a projection use the
                    target's.
MLP speculator      a state, at first the feature, is mixed with the embedding of the newest token
                    at every level, so that a draft follows the tokens before (Wertheimer et al.
                    2024, arXiv 2404.19124, section 3).
==================  ==============================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import BaseModel
from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.adapters.reading import whole_number
from hf_spec.common.errors import AssistantError
from hf_spec.drafting.one_pass_drafter import FixedProposals, Proposals
from hf_spec.engine.fast.packed_linear import install_packed_linears
from hf_spec.methods.published_weights import OutputHead, fitted, linear, sizes_of

STRATEGY = "heads"
MEDUSA, MLP_SPECULATOR = "medusa", "mlp_speculator"

# More levels than anybody published, by a factor of eight.
MAX_LEVELS = 64
NORM_EPS = 1e-6


class MedusaHeads(nn.Module):
    """K heads of a target, from tensors "i.j.linear.weight", "i.j.linear.bias" and "i.J.weight".

    Attributes:
        base: the target.
    """

    strategy = STRATEGY
    hidden_layers = (-1,)

    def __init__(self, tensors: Mapping[str, Tensor], num_levels: int, target: PreTrainedModel):
        super().__init__()
        self.base = BaseModel.of(target)
        self.num_levels = num_levels
        self.blocks = nn.ModuleList()
        self.projections = nn.ModuleList()
        for level in range(num_levels):
            mine = {key.partition(".")[2]: t for key, t in tensors.items() if _level(key) == level}
            depth = sum(key.endswith(".linear.weight") for key in mine)
            self.blocks.append(
                nn.ModuleList(
                    linear(mine[f"{j}.linear.weight"], mine[f"{j}.linear.bias"])
                    for j in range(depth)
                )
            )
            self.projections.append(OutputHead(target, mine.get(f"{depth}.weight")))

    def forward(self, features: Tensor, depth: int) -> Tensor:
        """(A, H) features -> (A, depth, V) logits of the first levels."""
        found = []
        for blocks, projection in list(zip(self.blocks, self.projections, strict=True))[:depth]:
            hidden = features
            for block in cast("nn.ModuleList", blocks):
                hidden = hidden + F.silu(block(hidden))
            found.append(projection(hidden))
        return torch.stack(found, dim=1)

    def propose(self, features: Tensor, depth: int) -> Proposals:
        """What follows the roots after (A, H) features."""
        return FixedProposals(self(features, depth))

    @property
    def timing_key(self) -> int:
        """See `ProposalHead`."""
        return id(self)

    def num_forwards(self, depth: int) -> int:
        """One pass of all heads."""
        return 1


class MlpSpeculator(nn.Module):
    """A speculator of K levels, from tensors "emb.i.weight", "proj.i.weight", "ln.i.weight", ...

    Tied weights are there once, "proj" twice, since its first one reads the feature.

    Attributes:
        base: the target that it is for.
    """

    strategy = STRATEGY
    hidden_layers = (-1,)

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        num_levels: int,
        scale_input: bool,
        target: PreTrainedModel,
    ):
        super().__init__()
        self.base = BaseModel.of(target)
        self.num_levels = num_levels
        self.scale_input = scale_input
        self.emb, self.proj, self.head, self.ln = (
            nn.ParameterList(
                nn.Parameter(tensors[f"{kind}.{i}.weight"], requires_grad=False)
                for i in range(_count(tensors, kind))
            )
            for kind in ("emb", "proj", "head", "ln")
        )
        self.shift = nn.ParameterList(
            nn.Parameter(tensors[f"ln.{i}.bias"], requires_grad=False) for i in range(len(self.ln))
        )
        inner = self.emb[0].shape[1]
        # So that state and tokens keep their shares of the variance, whatever K is.
        kept = 0.5 ** (0.5 / num_levels)
        self.token_weight = math.sqrt((1 - kept**2) * inner / 2) / kept

    def begin(self, features: Tensor) -> Tensor:
        """The state before the first level, from (A, H) features."""
        return _norm(features) / math.sqrt(2) if self.scale_input else features

    def step(self, level: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(M, V) logits after (M,) int64 tokens at states (M, width), and the states after them."""
        embedded = F.embedding(tokens, _at(self.emb, level))
        mixed = F.linear(state, _at(self.proj, level)) + embedded * self.token_weight
        state = F.gelu(_norm(mixed) * _at(self.ln, level) + _at(self.shift, level))
        return F.linear(state, _at(self.head, level)), state

    def propose(self, features: Tensor, depth: int) -> Proposals:
        """What follows the roots after (A, H) features."""
        return _Steps(self, features)

    @property
    def timing_key(self) -> int:
        """See `ProposalHead`."""
        return id(self)

    def num_forwards(self, depth: int) -> int:
        """A step for every level."""
        return depth


class _Steps(Proposals):
    """The steps of an MLP speculator."""

    def __init__(self, head: MlpSpeculator, features: Tensor):
        self._head = head
        self._state = head.begin(features)

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `Proposals`."""
        _, level = self._descend(parents)
        logits, self._state = self._head.step(level, tokens, self._state[parents])
        return logits


class NewestFeatures:
    """Keeps the newest feature of each row for a head; the runner of both."""

    def __init__(self, head: MedusaHeads | MlpSpeculator, num_rows: int):
        self.head = head
        self.forwards = 0
        self.device = next(head.parameters()).device
        self._dtype = next(head.parameters()).dtype
        self._features: list[Tensor | None] = [None] * num_rows

    @contextmanager
    def active(self) -> Iterator[NewestFeatures]:
        """Let the head compute its products as fast as the target does."""
        with install_packed_linears(self.head, rounded=True):
            yield self

    def restart(self, row: int) -> None:
        """Forget the feature of a row."""
        self._features[row] = None

    def knows(self, row: int) -> bool:
        """Whether the target has run a token of the row."""
        return self._features[row] is not None

    def learn(self, spans: Mapping[int, tuple[int, int]], states: Sequence[Tensor]) -> None:
        """Keep the last of the states of each row."""
        end = -1
        for row, (_, count) in spans.items():
            end += count
            self._features[row] = states[0][end].to(self.device, self._dtype)

    def propose(self, roots: Mapping[int, int], depth: int) -> Proposals:
        """See `ProposalRunner`."""
        self.forwards += self.head.num_forwards(depth)
        known = [feature for row in roots if (feature := self._features[row]) is not None]
        return self.head.propose(torch.stack(known), depth)


def build_medusa(head: PublishedHead, target: PreTrainedModel) -> MedusaHeads:
    """Medusa heads as FasterDecoding's code saves them; how many there are their tensors say.

    Repositories of version 1.0 may hold the whole model beside them, with the prefix "medusa_head".
    """
    prefix = "medusa_head."
    prefixed = any(key.startswith(prefix) for key in head.tensors)
    given = {
        key.removeprefix(prefix): tensor
        for key, tensor in head.tensors.items()
        if key.startswith(prefix) or not prefixed
    }
    levels = {_level(key) for key in given}
    if not given or levels != set(range(len(levels))) or len(levels) > MAX_LEVELS:
        raise AssistantError(
            f"{head.name!r} holds no Medusa heads: its tensors are not '0.0.linear.weight', "
            "'0.1.weight' and so on, for one head after the other"
        )
    size, vocab = sizes_of(target)
    projected = {f"{i}.{_depth(given, i)}.weight" in given for i in levels}
    if len(projected) > 1:
        raise AssistantError(f"{head.name!r} has projections of some Medusa heads and not of all")
    expected: dict[str, tuple[int, ...]] = {}
    for level in levels:
        depth = _depth(given, level)
        for block in range(depth):
            expected[f"{level}.{block}.linear.weight"] = (size, size)
            expected[f"{level}.{block}.linear.bias"] = (size,)
        if True in projected:
            expected[f"{level}.{depth}.weight"] = (vocab, size)
    tensors = fitted(head, given, expected, target)
    return MedusaHeads(tensors, len(levels), target)


def build_mlp_speculator(head: PublishedHead, target: PreTrainedModel) -> MlpSpeculator:
    """An MLP speculator as IBM's code saves it, with tied weights or without."""
    given = {key.removeprefix("speculator."): tensor for key, tensor in head.tensors.items()}
    what = f"the config of {head.name!r}"
    counts = {kind: _count(given, kind) for kind in ("emb", "proj", "head", "ln")}
    num_levels = max(counts.values())
    if counts["emb"] == 1:
        # Tied weights say nothing of the number of levels.
        num_levels = whole_number(what, head.config, "n_predict", 1, MAX_LEVELS)
    tied = {"emb": 1, "proj": min(2, num_levels), "head": 1, "ln": 1}
    alike = dict.fromkeys(counts, num_levels)
    if counts not in (tied, alike) or not 1 <= num_levels <= MAX_LEVELS:
        raise AssistantError(
            f"{head.name!r} is no MLP speculator: it has {counts}, which is neither one of each "
            f"for {num_levels} levels nor tied weights"
        )
    size, vocab = sizes_of(target)
    inner = int(given["emb.0.weight"].shape[-1])
    expected = {}
    for kind, count in counts.items():
        for i in range(count):
            expected[f"{kind}.{i}.weight"] = {
                "emb": (vocab, inner),
                "proj": (inner, size if i == 0 else inner),
                "head": (vocab, inner),
                "ln": (inner,),
            }[kind]
    expected |= {f"ln.{i}.bias": (inner,) for i in range(counts["ln"])}
    scale_input = head.config.get("scale_input", False)
    if not isinstance(scale_input, bool):
        raise AssistantError(f"{what} has scale_input={scale_input!r}, not true or false")
    return MlpSpeculator(fitted(head, given, expected, target), num_levels, scale_input, target)


def _norm(states: Tensor) -> Tensor:
    """Divided by their root mean square."""
    return F.rms_norm(states, states.shape[-1:], eps=NORM_EPS)


def _at(weights: nn.ParameterList, level: int) -> Tensor:
    """Of a level, the last one for those that share it."""
    return weights[min(level, len(weights) - 1)]


def _level(key: str) -> int:
    """The head that a tensor of Medusa belongs to, -1 for any other tensor."""
    found = re.fullmatch(r"(\d{1,2})\.\d{1,2}\.(linear\.weight|linear\.bias|weight)", key)
    return int(found[1]) if found else -1


def _depth(tensors: Mapping[str, Tensor], level: int) -> int:
    return sum(re.fullmatch(rf"{level}\.\d+\.linear\.weight", key) is not None for key in tensors)


def _count(tensors: Mapping[str, Tensor], kind: str) -> int:
    return sum(re.fullmatch(rf"{kind}\.\d+\.weight", key) is not None for key in tensors)


register_family(PublishedFamily(MEDUSA, STRATEGY, build_medusa))
register_family(PublishedFamily(MLP_SPECULATOR, STRATEGY, build_mlp_speculator))
