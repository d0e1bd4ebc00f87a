"""Config and drafter of `pard`; for the method see `hf_spec.methods.pard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedFamily, PublishedHead, register_family
from hf_spec.backend.device.transfer import fetch_all
from hf_spec.common.errors import AssistantError
from hf_spec.drafting.config import AUTO, AssistantConfig, shared_options
from hf_spec.drafting.cost_model.adaptive_length_drafter import with_policy
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.drafting.level_drafter import stacked
from hf_spec.drafting.token_graph import position_graph
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.sampling import distribution, draw
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.draft_model.drafter import DraftConfig, DraftModelDrafter
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.draft_model.smaller import smaller_model
from hf_spec.methods.registry import register

STRATEGY = "pard"


def _make(config: PardConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    model = resolve_draft_model(config.strategy, assistant, target)
    model = smaller_model(model, config.assistant_bits, config.draft_vocab_size)
    make = partial(PardDrafter, model=model, vocab_size=num_embeddings(target))
    return with_policy(config, target, make, config.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    # A wide tree: the cost model of `auto` chooses the nodes to send.
    wide = PardConfig(
        max_draft_tokens=8, max_nodes=24, children=3, sample_drafts=False, **shared_options(auto)
    )
    return _make(wide, target, assistant)


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class PardConfig(DraftConfig):
    """Options of `pard`.

    Attributes:
        max_draft_tokens: K, the positions predicted in one forward pass; published models are used
            with 8 to 12.
        sample_drafts: sample a chain when the target samples; trees are never sampled.
        children: tokens per position; 1 is a chain.
        max_nodes: most nodes sent to the target, root excluded, in order of path probability;
            "auto" lets the cost model choose the nodes of a tree; None is 32.
    """

    adapter_methods = ()
    sizes = ("max_draft_tokens", "max_nodes")
    usual = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 32})
    longest = MappingProxyType({"max_draft_tokens": 16, "max_nodes": 32})

    children: int = 1
    max_nodes: int | str | None = AUTO

    @property
    def draws(self) -> bool:
        """True if drafts are sampled when the target samples."""
        return self.sample_drafts and self.children == 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("children", 1)


def mask_token(model: PreTrainedModel) -> int:
    """Return the mask token id of a PARD model; raise `AssistantError` without a valid one."""
    config: Any = model.config.get_text_config()
    token, size = getattr(config, "pard_token", None), num_embeddings(model)
    if token is None:
        raise AssistantError(
            f"the assistant, a {type(model).__name__}, has no pard_token in its config, so it was "
            "not trained to draft after mask tokens; use spec_strategy='draft' or 'tree'"
        )
    if type(token) is not int or not 0 <= token < size:
        raise AssistantError(
            f"the assistant's config has pard_token={token!r}, but its token ids are 0 to "
            f"{size - 1}; correct config.json"
        )
    return token


def _build(head: PublishedHead, target: PreTrainedModel) -> PreTrainedModel:
    return resolve_draft_model(STRATEGY, head.name, target)


register_family(PublishedFamily(STRATEGY, STRATEGY, _build))


class _Predictions(NamedTuple):
    """Per draft position of a row: candidates, most probable first; policy score; distribution."""

    tokens: Sequence[Sequence[int]] = ()
    token_probs: Sequence[Sequence[float]] = ()
    scores: Sequence[float] = ()
    probs: Sequence[Tensor] | Tensor = ()


class PardDrafter(DraftModelDrafter):
    """Predicts all draft tokens of all rows in one forward pass of a PARD model.

    Attributes:
        counters: "draft_nodes", all of them sent; "rounds", one per row and draft.
    """

    counted = ("draft_nodes", "rounds")

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
        """Return 1 for a draft of any depth."""
        return min(depth, 1)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one chain or tree per unfinished row, from one forward pass over all rows."""
        most = self.max_levels(state, limits)
        depths = {row: max(0, min(self.policy.limit(row), most[row])) for row in limits}
        predicted = dict.fromkeys(limits, _Predictions())
        if any(depths.values()):
            predicted |= self._predict(state, {row: n for row, n in depths.items() if n})
        self._apply_policy(state, depths, predicted)
        drafts, node_probs, distributions = {}, [], []
        self.graphs = {}
        for row, (tokens, token_probs, _, probs) in predicted.items():
            root = state.tokens[row][-1]
            graph = position_graph(root, tokens, token_probs, state.stop.ends_sequence)
            sent = graph.unmerge(self.shape.max_nodes, depths[row])
            self.graphs[row] = graph
            drafts[row] = sent.tokens, sent.parents
            node_probs += sent.probs
            # The last node of a chain has no sampled child.
            distributions += [*probs[: len(sent.tokens) - 1], None]
            self.counters["rounds"] += 1
            self.counters["draft_nodes"] += len(sent.tokens) - 1
        draft_probs = stacked(distributions) if self.samples else None
        return DraftTree.from_drafts(drafts, state.num_rows, draft_probs, node_probs)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Update the policy; no keys and values of the draft are stored."""
        self.policy.observe_all(verdict)

    def _predict(
        self, state: GenerationState, depths: Mapping[int, int]
    ) -> dict[int, _Predictions]:
        """Return the predictions of each row, with one forward pass and one transfer."""
        drafts = {
            row: ([state.tokens[row][-1], *[self.mask_token] * (depth - 1)], range(-1, depth - 1))
            for row, depth in depths.items()
        }
        tree = DraftTree.from_drafts(drafts, state.num_rows)
        logits = self._runner.forward(tree, state.tokens).logits.to(state.device, torch.float32)
        # Keep the root's keys and values and drop those of the masks.
        self._runner.keep([()] * state.num_rows)
        positions = [(row, index) for row, depth in depths.items() for index in range(depth)]
        rows, prefixes = [row for row, _ in positions], None
        # The draft tokens in between are unknown, so processors see only the committed text.
        if self.processors.reads_prefix:
            prefixes = state.prefixes(rows, [()] * len(rows))
        probs = distribution(self.processors(rows, prefixes, logits))
        if self.samples:
            tokens = draw(probs)
            token_probs = probs.gather(-1, tokens)
        else:
            token_probs, tokens = probs.topk(min(self.shape.children, probs.shape[-1]), dim=-1)
        scores = self.policy.score(
            probs, [state.generated[row] + index for row, index in positions]
        )
        fetched = fetch_all([tokens, token_probs, *([] if scores is None else [scores])])
        if scores is None:
            fetched.append([0.0] * len(rows))
        columns: list[Any] = [*fetched, probs]
        predicted, end = {}, 0
        for row, depth in depths.items():
            start, end = end, end + depth
            predicted[row] = _Predictions(*(column[start:end] for column in columns))
        return predicted

    def _apply_policy(
        self, state: GenerationState, depths: dict[int, int], predicted: Mapping[int, _Predictions]
    ) -> None:
        """Reduce the depth of rows whose policy stops; it decides position by position."""
        reach = dict.fromkeys(predicted, 1.0)
        level, growing = 0, list(predicted)
        while growing := [row for row in growing if level + 1 < depths[row]]:
            newest = []
            for row in growing:
                tokens, chances = predicted[row].tokens[level], predicted[row].token_probs[level]
                reach[row] *= min(1.0, sum(chances))
                position, score = state.generated[row] + level, predicted[row].scores[level]
                newest.append(DraftedToken(row, tokens[0], position, chances[0], score, reach[row]))
            level += 1
            if level < self.config.min_draft_tokens:
                continue
            for row, goes_on in zip(growing, self.policy.goes_on(newest), strict=True):
                if not goes_on:
                    depths[row] = level
