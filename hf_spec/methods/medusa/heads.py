"""Networks of Medusa heads and MLP speculators, and how their published files are read.

The feature f is the hidden state after the target's final norm, of the newest token that it has
run. The target's prediction from f is the root, so the heads predict the tokens after the root.

Medusa, head i at depth i + 1 below the root (Cai et al. 2024, arXiv 2401.10774, section 2.1)::

    h = f;  h = h + silu(linear_ij(h)) for each block j;  logits_i = projection_i(h)

MLP speculator of K levels, for the token t before (Wertheimer et al. 2024, arXiv 2404.19124,
section 3); norm is RMS norm, and w weights the token so that the shares of state and token in the
variance do not depend on K::

    s_0 = f, or norm(f) / sqrt 2 (`scale_input`)
    s_i = gelu(ln_i(proj_i(s_{i-1}) + w * emb_i[t]));  logits_i = head_i(s_i)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

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
from hf_spec.methods.medusa.layouts import canonical_tensors, draft_vocabulary
from hf_spec.methods.one_pass_heads import OnePassHead
from hf_spec.methods.published_weights import OutputHead, fitted, linear, sizes_of

STRATEGY = "heads"
MEDUSA, MLP_SPECULATOR = "medusa", "mlp_speculator"

# Published heads have up to 8 levels.
MAX_LEVELS = 64
NORM_EPS = 1e-6


class MedusaHeads(OnePassHead):
    """K Medusa heads, from tensors "i.j.linear.weight", "i.j.linear.bias" and "i.J.weight".

    Heads without a projection use the target's output head. `vocabulary` are the (R,) int64 token
    ids of the outputs; None for all tokens.
    """

    strategy = STRATEGY

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        num_levels: int,
        target: PreTrainedModel,
        vocabulary: Tensor | None = None,
    ):
        super().__init__()
        self.base = BaseModel.of(target)
        self.num_levels = num_levels
        self.vocabulary = vocabulary
        self.blocks = nn.ModuleList()
        self.projections = nn.ModuleList()
        for level in range(num_levels):
            depth = _depth(tensors, level)
            names = [f"{level}.{block}.linear" for block in range(depth)]
            layers = (linear(tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in names)
            self.blocks.append(nn.ModuleList(layers))
            weight = tensors.get(f"{level}.{depth}.weight")
            self.projections.append(OutputHead(target, weight, vocabulary))

    def forward(self, features: Tensor, depth: int) -> Tensor:
        """(A, H) features -> (A, depth, V) logits of the first levels."""
        logits = []
        for level in range(depth):
            projection = cast("OutputHead", self.projections[level])
            logits.append(projection.over_vocabulary(self.draft_logits(features, level)))
        return torch.stack(logits, dim=1)

    def draft_logits(self, features: Tensor, level: int) -> Tensor:
        """(A, H) features -> (A, R) logits of a level, from 0, over the draft vocabulary."""
        hidden = features
        for block in cast("nn.ModuleList", self.blocks[level]):
            hidden = hidden + F.silu(block(hidden))
        return cast("OutputHead", self.projections[level]).draft_logits(hidden)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by the names of `hf_spec.methods.medusa.layouts`."""
        weights: dict[str, nn.Parameter] = {}
        for level, (blocks, head) in enumerate(zip(self.blocks, self.projections, strict=True)):
            layers: Any = list(cast("nn.ModuleList", blocks))
            for index, layer in enumerate(layers):
                weights[f"{level}.{index}.linear.weight"] = layer.weight
                weights[f"{level}.{index}.linear.bias"] = layer.bias
            weights[f"{level}.{len(layers)}.weight"] = cast("Any", head).scores.weight
        return weights

    def propose(self, features: Tensor, depth: int) -> Proposals:
        """Return the proposals after the roots that follow (A, H) features."""
        return FixedProposals(self(features, depth))


class MlpSpeculator(OnePassHead):
    """MLP speculator of K levels, from "{emb,proj,head,ln}.i.weight" and "ln.i.bias".

    Tied weights are stored once; "proj" twice, since the first one reads the feature.
    """

    strategy = STRATEGY

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
        state_weight = 0.5 ** (0.5 / num_levels)
        self.token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def step(self, level: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (M, V) logits after (M,) int64 tokens at (M, width) states, and the new states."""
        embedded = F.embedding(tokens, _at(self.emb, level))
        mixed = F.linear(state, _at(self.proj, level)) + embedded * self.token_weight
        state = F.gelu(_norm(mixed) * _at(self.ln, level) + _at(self.shift, level))
        return F.linear(state, _at(self.head, level)), state

    def propose(self, features: Tensor, depth: int) -> Proposals:
        """Return the proposals after the roots that follow (A, H) features."""
        return _SpeculatorProposals(self, features)

    def num_forwards(self, depth: int) -> int:
        """Return one step per level."""
        return depth


class _SpeculatorProposals(Proposals):
    """Proposals of an MLP speculator, one step per level."""

    def __init__(self, head: MlpSpeculator, features: Tensor):
        self._head = head
        self._state = _norm(features) / math.sqrt(2) if head.scale_input else features

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `Proposals`."""
        _, level = self._descend(parents)
        logits, self._state = self._head.step(level, tokens, self._state[parents])
        return logits


class NewestFeatures:
    """Runner of both kinds of heads, with the newest feature of each row."""

    def __init__(self, head: MedusaHeads | MlpSpeculator, num_rows: int):
        self.head = head
        self.forwards = 0
        self.device = next(head.parameters()).device
        self._dtype = next(head.parameters()).dtype
        self._features: list[Tensor | None] = [None] * num_rows

    @contextmanager
    def active(self) -> Iterator[NewestFeatures]:
        """Run the head's linear layers with packed weights."""
        with install_packed_linears(self.head, rounded=True):
            yield self

    def restart(self, row: int) -> None:
        """Forget the feature of a row."""
        self._features[row] = None

    def knows(self, row: int) -> bool:
        """Return True if the target has run a token of the row."""
        return self._features[row] is not None

    def learn(self, spans: Mapping[int, tuple[int, int]], states: Sequence[Tensor]) -> None:
        """Keep the last hidden state of each row."""
        end = -1
        for row, (_, count) in spans.items():
            end += count
            self._features[row] = states[0][end].to(self.device, self._dtype)

    def propose(self, roots: Mapping[int, int], depth: int) -> Proposals:
        """See `ProposalRunner`."""
        self.forwards += self.head.num_forwards(depth)
        features = [feature for row in roots if (feature := self._features[row]) is not None]
        return self.head.propose(torch.stack(features), depth)


def build_medusa(head: PublishedHead, target: PreTrainedModel) -> MedusaHeads:
    """Return Medusa heads in the layout of FasterDecoding's code or vLLM's.

    The tensors give the number of heads.
    """
    stored = canonical_tensors(head)
    levels = {_level(key) for key in stored}
    if not stored or levels != set(range(len(levels))) or len(levels) > MAX_LEVELS:
        raise AssistantError(
            f"{head.name!r} holds no Medusa heads: its tensors are not '0.0.linear.weight', "
            "'0.1.weight' and so on, numbered without gaps"
        )
    size, vocab = sizes_of(target)
    vocabulary = draft_vocabulary(head, vocab)
    if vocabulary is not None:
        # vLLM accepts projections with all rows, too.
        whole = (vocab, size)
        cut = {key: t[vocabulary] for key, t in stored.items() if tuple(t.shape) == whole}
        stored |= {} if vocab == size else cut
    projected = {f"{i}.{_depth(stored, i)}.weight" in stored for i in levels}
    if len(projected) > 1:
        raise AssistantError(
            f"{head.name!r} is damaged: it has projections of some Medusa heads, but not of all"
        )
    expected: dict[str, tuple[int, ...]] = {}
    for level in levels:
        depth = _depth(stored, level)
        for block in range(depth):
            expected[f"{level}.{block}.linear.weight"] = (size, size)
            expected[f"{level}.{block}.linear.bias"] = (size,)
        if True in projected:
            rows = vocab if vocabulary is None else len(vocabulary)
            expected[f"{level}.{depth}.weight"] = (rows, size)
    tensors = fitted(head, stored, expected, target)
    return MedusaHeads(tensors, len(levels), target, vocabulary)


def build_mlp_speculator(head: PublishedHead, target: PreTrainedModel) -> MlpSpeculator:
    """Return an MLP speculator in the format of IBM's code, with tied weights or without."""
    stored = {key.removeprefix("speculator."): tensor for key, tensor in head.tensors.items()}
    what = f"the config of {head.name!r}"
    counts = {kind: _count(stored, kind) for kind in ("emb", "proj", "head", "ln")}
    num_levels = max(counts.values())
    if counts["emb"] == 1:
        # The number of tied weights does not depend on the number of levels.
        num_levels = whole_number(what, head.config, "n_predict", 1, MAX_LEVELS)
    tied = {"emb": 1, "proj": min(2, num_levels), "head": 1, "ln": 1}
    untied = dict.fromkeys(counts, num_levels)
    if counts not in (tied, untied) or not 1 <= num_levels <= MAX_LEVELS:
        raise AssistantError(
            f"{head.name!r} is not an MLP speculator: it has {counts}, which is neither one of "
            f"each for {num_levels} levels nor tied weights"
        )
    size, vocab = sizes_of(target)
    inner = int(stored["emb.0.weight"].shape[-1])
    shapes = {"emb": (vocab, inner), "proj": (inner, inner), "head": (vocab, inner), "ln": (inner,)}
    expected = {f"{k}.{i}.weight": shapes[k] for k, count in counts.items() for i in range(count)}
    expected |= {f"ln.{i}.bias": (inner,) for i in range(counts["ln"])}
    expected["proj.0.weight"] = (inner, size)
    scale_input = head.config.get("scale_input", False)
    if not isinstance(scale_input, bool):
        raise AssistantError(f"{what} has scale_input={scale_input!r}, not true or false")
    return MlpSpeculator(fitted(head, stored, expected, target), num_levels, scale_input, target)


def _norm(states: Tensor) -> Tensor:
    """Divide each state by its root mean square."""
    return F.rms_norm(states, states.shape[-1:], eps=NORM_EPS)


def _at(weights: nn.ParameterList, level: int) -> Tensor:
    """Return the weight of a level; tied levels share the last one."""
    return weights[min(level, len(weights) - 1)]


def _level(key: str) -> int:
    """Return the number of the Medusa head that a tensor belongs to; -1 for any other tensor."""
    match = re.fullmatch(r"(\d{1,2})\.\d{1,2}\.(linear\.weight|linear\.bias|weight)", key)
    return int(match[1]) if match else -1


def _depth(tensors: Mapping[str, Tensor], level: int) -> int:
    """Return the number of residual blocks of a Medusa head."""
    return sum(re.fullmatch(rf"{level}\.\d+\.linear\.weight", key) is not None for key in tensors)


def _count(tensors: Mapping[str, Tensor], kind: str) -> int:
    """Return the number of an MLP speculator's weights of a kind."""
    return sum(re.fullmatch(rf"{kind}\.\d+\.weight", key) is not None for key in tensors)


register_family(PublishedFamily(MEDUSA, STRATEGY, build_medusa))
register_family(PublishedFamily(MLP_SPECULATOR, STRATEGY, build_mlp_speculator))
