"""PARD: a draft model that was trained to predict several tokens in one pass, after mask tokens.

Its config names the mask token, `pard_token`. A draft is one forward: what is committed and new,
the root, and masks after it, each of which predicts the token of its own place (An et al. 2025,
arXiv 2504.18583). What a mask leaves in the keys and values is not what a token leaves, so none of
it stays, and drafts that were accepted are fed again as the tokens they are.

The places are predicted at once, each without knowing the tokens before it. A chain has the best
token of every place. A tree has several, and sends the likeliest paths, at no further forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.backend.device.transfer import fetch_all
from hf_spec.common.errors import AssistantError
from hf_spec.drafting.config import AUTO
from hf_spec.drafting.cost_model.cost_model_drafter import with_policy
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.drafting.level_drafter import stacked
from hf_spec.drafting.token_graph import place_graph
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.sampling import distribution, draw
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.draft_model.drafter import DraftModelConfig, DraftModelDrafter
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.registry import register

FAMILY = STRATEGY = "pard"
COUNTERS = ("draft_nodes", "rounds")


def _make(config: PardConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    model = resolve_draft_model(config.strategy, assistant, target)
    make = partial(PardDrafter, model=model, vocab_size=num_embeddings(target))
    return with_policy(config, target, make, config.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there.
    whole = PardConfig(
        max_draft_tokens=8, max_nodes=24, children=3, sample_drafts=False, batching=batching
    )
    return _make(whole, target, assistant)


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class PardConfig(DraftModelConfig):
    """Options of drafts after mask tokens.

    Attributes:
        max_draft_tokens: as many places are predicted in a pass; the published models are run
            with 8 to 12.
        sample_drafts: draw a chain at random when the target samples; a tree always has the
            likeliest tokens.
        children: tokens per place; 1 is a chain.
        max_nodes: most nodes sent to the target, root excluded, the likeliest paths first; "auto",
            of a tree as many as are worth their time; None is 32.
    """

    sizes = ("max_draft_tokens", "max_nodes")
    usual = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 32})
    longest = MappingProxyType({"max_draft_tokens": 16, "max_nodes": 32})

    children: int = 1
    max_nodes: int | str | None = AUTO

    @property
    def draws(self) -> bool:
        """Chains, if that is said."""
        return self.sample_drafts and self.children == 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("children", 1)


def mask_token(model: PreTrainedModel) -> int:
    """The token that stands for a place to predict, from the config of a PARD model."""
    config: Any = model.config.get_text_config()
    token, size = getattr(config, "pard_token", None), num_embeddings(model)
    if token is None:
        raise AssistantError(
            f"the assistant, a {type(model).__name__}, has no pard_token in its config, so it was "
            "not trained to draft after mask tokens; use spec_strategy='draft' or 'tree'"
        )
    if type(token) is not int or not 0 <= token < size:
        raise AssistantError(
            f"the assistant's config says pard_token={token!r}, and its tokens go from 0 to "
            f"{size - 1}; correct it in config.json"
        )
    return token


def _build(head: PublishedHead, target: PreTrainedModel) -> PreTrainedModel:
    return resolve_draft_model(STRATEGY, head.name, target)


register_family(PublishedFamily(FAMILY, STRATEGY, _build))


@dataclass(frozen=True)
class _Places:
    """What was predicted for one row: per place tokens, their probabilities and the policy's score.

    `probs` are the (places, V) distributions that these come from.
    """

    tokens: list[list[int]]
    chances: list[list[float]]
    scores: list[float]
    probs: Tensor


class PardDrafter(DraftModelDrafter):
    """Predicts all places of a draft in one forward of a PARD model over all rows.

    Attributes:
        counters: "draft_nodes", all of them sent; "rounds", one per row and draft.
    """

    def __init__(
        self,
        config: PardConfig,
        model: PreTrainedModel,
        policy: LengthPolicy | None = None,
        vocab_size: int | None = None,
    ):
        super().__init__(config, model, policy, vocab_size)
        self.mask_token = mask_token(model)

    def num_forwards(self, depth: int) -> int:
        """One, however deep."""
        return min(depth, 1)

    def start(self, state: GenerationState) -> None:
        """As for other draft models; a tree is never drawn at random."""
        super().start(state)
        self.samples = self.samples and self.shape.children == 1
        self.counters = dict.fromkeys(COUNTERS, 0)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One chain or tree per unfinished row, in one forward over all rows."""
        depths = {row: min(self.policy.limit(row), limit) for row, limit in limits.items()}
        predicted = self._predict(state, {row: n for row, n in depths.items() if n > 0})
        self._shorten(state, depths, predicted)
        drafts, chances, distributions = {}, [], []
        self.graphs = {}
        for row, depth in depths.items():
            places = predicted.get(row, NO_PLACES)
            self.graphs[row] = graph = place_graph(
                state.tokens[row][-1], places.tokens, places.chances, state.stop.ends_sequence
            )
            sent = graph.unmerge(self.shape.max_nodes, max(depth, 0))
            drafts[row] = sent.tokens, sent.parents
            chances += sent.probs
            # The last node of a chain has no child that was drawn.
            distributions += [*places.probs[: len(sent.tokens) - 1], None]
            self.counters["rounds"] += 1
            self.counters["draft_nodes"] += len(sent.tokens) - 1
        probs = stacked(distributions) if self.samples else None
        return DraftTree.from_drafts(drafts, state.num_rows, probs, chances)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Tell the policy. Nothing of the draft is stored, so nothing is kept."""
        self.policy.observe_all(verdict)

    def _predict(self, state: GenerationState, depths: Mapping[int, int]) -> dict[int, _Places]:
        """Per row its places; one forward and one transfer."""
        if not depths:
            return {}
        drafts = {
            row: ([state.tokens[row][-1], *[self.mask_token] * (depth - 1)], range(-1, depth - 1))
            for row, depth in depths.items()
        }
        tree = DraftTree.from_drafts(drafts, state.num_rows)
        output = self._runner.forward(tree, state.tokens)
        # The root's keys and values are a token's, those after it masks'.
        self._runner.keep([()] * state.num_rows)
        owners = [(row, place) for row, depth in depths.items() for place in range(depth)]
        probs, parts = self._lists(state, owners, output)
        predicted, end = {}, 0
        for row, depth in depths.items():
            start, end = end, end + depth
            mine = [part[start:end] for part in parts]
            predicted[row] = _Places(mine[0], mine[1], mine[2], probs[start:end])
        return predicted

    def _lists(
        self, state: GenerationState, owners: Sequence[tuple[int, int]], output: ForwardOutput
    ) -> tuple[Tensor, list[Any]]:
        """(places, V) distributions; tokens, their probabilities and the scores as lists."""
        rows, prefixes = [row for row, _ in owners], None
        # The tokens between are not known yet: the text so far stands in for a place's prefix.
        if self.processors.reads_prefix:
            prefixes = state.prefixes(rows, [()] * len(rows))
        logits = output.logits.to(state.device, torch.float32)
        probs = distribution(self.processors(rows, prefixes, logits))
        if self.samples:
            tokens = draw(probs)
            likely = probs.gather(-1, tokens)
        else:
            likely, tokens = probs.topk(min(self.shape.children, probs.shape[-1]), dim=-1)
        scored = self.policy.score(probs, [state.generated[row] + n for row, n in owners])
        found = fetch_all([tokens, likely, *([] if scored is None else [scored])])
        return probs, found if len(found) > 2 else [*found, [0.0] * len(rows)]

    def _shorten(
        self, state: GenerationState, depths: dict[int, int], predicted: Mapping[int, _Places]
    ) -> None:
        """Lower the depth of rows whose policy stops, asked about one place after the other."""
        reach = dict.fromkeys(predicted, 1.0)
        level, growing = 0, list(predicted)
        while growing := [row for row in growing if level + 1 < depths[row]]:
            newest = []
            for row in growing:
                places = predicted[row]
                reach[row] *= min(1.0, sum(places.chances[level]))
                token, chance = places.tokens[level][0], places.chances[level][0]
                position = state.generated[row] + level
                newest.append(
                    DraftedToken(row, token, position, chance, places.scores[level], reach[row])
                )
            level += 1
            if level < self.config.min_draft_tokens:
                continue
            for row, goes_on in zip(growing, self.policy.goes_on(newest), strict=True):
                if not goes_on:
                    depths[row] = level


# Of a row that drafts nothing.
NO_PLACES = _Places([], [], [], torch.empty(0))
