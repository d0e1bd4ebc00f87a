"""Drafts from a Gemma 4 assistant, which reads the target's keys and values and has none itself.

Google publishes one for every Gemma 4. It keeps nothing between rounds: a step needs a token, the
state of its parent and what the target has stored (`hf_spec.methods.gemma_assistant.head`). So a
level of a tree is one pass, however wide, and there is nothing to be fed after a round.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.backend.device import transfer
from hf_spec.drafting.beam_config import BeamConfig
from hf_spec.drafting.cost_model.cost_model_drafter import with_policy
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import Graphs, LevelDrafter, Owners
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.vocabulary import fit_logits, num_embeddings
from hf_spec.methods.gemma_assistant.head import FAMILY, STRATEGY, GemmaAssistant
from hf_spec.methods.gemma_assistant.runner import AssistantRunner
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.registry import register


def _make(config: GemmaAssistantConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    found = resolve_published(STRATEGY, assistant, target, (FAMILY,))
    make = partial(GemmaAssistantDrafter, assistant=found, target=target)
    return with_policy(config, target, make, config.shape.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there.
    whole = GemmaAssistantConfig(
        max_draft_tokens=5, max_nodes=24, tree="dynamic", batching=batching
    )
    return _make(whole, target, assistant)


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class GemmaAssistantConfig(BeamConfig):
    """Options of a Gemma assistant's drafts."""

    usual = MappingProxyType({"max_draft_tokens": 4, "max_nodes": 24})
    longest = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 32})


class GemmaAssistantDrafter(LevelDrafter):
    """Grows chains and trees with a pass of the assistant per level."""

    # From `start` on, and of the newest level where each (row, node) is.
    _runner: AssistantRunner
    _places: dict[tuple[int, int], int]

    hidden_layers = (-1,)
    assisted_refusal_reason = (
        "an assistant needs the target's states, keys and values, which assisted decoding does not "
        f"hand on; use spec_strategy={STRATEGY!r}"
    )

    def __init__(
        self,
        config: GemmaAssistantConfig,
        policy: LengthPolicy,
        assistant: GemmaAssistant,
        target: PreTrainedModel,
    ):
        super().__init__(config, policy)
        self.assistant = assistant
        self._embedding: Any = target.get_input_embeddings()
        self._vocab_size = num_embeddings(target)

    @property
    def timing_key(self) -> Hashable:
        """The assistant."""
        return id(self.assistant)

    def start(self, state: GenerationState) -> None:
        """No row has a state to begin from."""
        super().start(state)
        self._runner = AssistantRunner(self.assistant, self._embedding)

    def restart(self, row: int) -> None:
        """One row has none, and a policy that knows nothing of it."""
        super().restart(row)
        self._runner.restart(row)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, a root alone before the target has run its prompt."""
        known = {row: n if self._runner.can_draft(row) else 0 for row, n in limits.items()}
        return super().draft(state, known)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the states that the next drafts begin from; tell the policy."""
        super().observe(verdict, output)
        self._runner.learn(verdict, output)

    def probabilities(self, state: GenerationState, graphs: Graphs, owners: Owners) -> Tensor:
        """(nodes, V) float32: what the assistant says of each (row, node)."""
        tokens = torch.tensor([graphs[row].tokens[node] for row, node in owners])
        above = None
        if owners[0][1]:
            above = torch.tensor([self._places[r, graphs[r].parents[n]] for r, n in owners])
        self._places = {owner: place for place, owner in enumerate(owners)}
        logits = self._runner.run([row for row, _ in owners], tokens, above)
        return self.processed(state, graphs, owners, self._fitted(logits, state))

    @property
    def supports_device_growth(self) -> bool:
        """On a GPU."""
        return self._runner.device.type in transfer.ASYNCHRONOUS

    def propose_on_device(self, state: GenerationState, growing: DeviceGrowth) -> Tensor:
        """(nodes, V) float32: what the assistant says of each node that runs next."""
        given = growing.tokens
        if given is None:
            tokens, above = torch.tensor([state.tokens[row][-1] for row in growing.rows]), None
        else:
            device = self._runner.device
            tokens, above = given.to(device), growing.above.to(device)
        logits = self._runner.run(growing.owners, tokens, above)
        return self.processed_unread(growing.owners, self._fitted(logits, state))

    def _fitted(self, logits: Tensor, state: GenerationState) -> Tensor:
        return fit_logits(logits.to(state.device, torch.float32), self._vocab_size)
