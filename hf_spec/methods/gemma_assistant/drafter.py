"""Drafts from a Gemma 4 assistant, which attends to the target's KV cache and has none itself.

Google publishes one for every Gemma 4. It stores nothing between rounds: a step reads a token, the
hidden state of its parent and the target's KV cache (`hf_spec.methods.gemma_assistant.head`). So a
level of a tree is one pass of any width, and accepted tokens need no further pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.backend.device.transfer import send
from hf_spec.drafting.config import AssistantConfig
from hf_spec.drafting.cost_model.adaptive_length_drafter import with_policy
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import BeamConfig, LevelDrafter
from hf_spec.drafting.tree_growth import Growth
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.packing import PreparedStep
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.methods.gemma_assistant.head import FAMILY, STRATEGY, GemmaAssistant
from hf_spec.methods.gemma_assistant.runner import AssistantRunner
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.registry import register


def _make(config: GemmaAssistantConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head = resolve_published(STRATEGY, assistant, target, (FAMILY,))
    make = partial(GemmaAssistantDrafter, assistant=head, target=target)
    return with_policy(config, target, make, config.shape.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    tree = GemmaAssistantConfig(tree="dynamic", batching=auto.batching)
    return _make(tree, target, assistant)


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class GemmaAssistantConfig(BeamConfig):
    """Options of a Gemma assistant's drafts."""

    usual = MappingProxyType({"max_draft_tokens": 4, "max_nodes": 24})
    longest = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 32})


class GemmaAssistantDrafter(LevelDrafter):
    """Grows chains and trees with a pass of the assistant per level.

    Between rounds there is one state per row: the target's hidden state of the token before the
    root.
    """

    _runner: AssistantRunner
    # (M, H) states after the nodes of the last pass.
    _node_states: Tensor

    hidden_layers = (-1,)
    assisted_refusal_reason = (
        "an assistant needs the target's hidden states, keys and values, which assisted decoding "
        f"does not provide; use spec_strategy={STRATEGY!r}"
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
        self._target = target

    @property
    def timing_key(self) -> Hashable:
        """The assistant."""
        return id(self.assistant)

    def start(self, state: GenerationState) -> None:
        """Begin without hidden states of any row."""
        super().start(state)
        self.draft_device = self.assistant.device
        cached = state.expected_length > 0
        self._runner = AssistantRunner(self.assistant, self._target, cached)
        self._storage: RowStorage | None = None
        self._root_states: dict[int, Tensor] = {}

    def restart(self, row: int) -> None:
        """Drop the hidden state of the row, and reset its policy."""
        super().restart(row)
        self._root_states.pop(row, None)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one tree per unfinished row, the root alone before the target's prefill."""
        able = {row: n if row in self._root_states else 0 for row, n in limits.items()}
        return super().draft(state, able)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Store the target's states of the tokens before the next roots, and update the policy."""
        super().observe(verdict, output)
        self._storage = output.storage
        tree = verdict.tree
        rows = [row for row in range(tree.num_rows) if tree.nodes(row)]
        last = [[tree.row_start[row], *verdict.accepted[row]][-1] for row in rows]
        hidden = output.hidden[-1]
        (indices,) = send([torch.tensor([output.nodes[node] for node in last])], hidden.device)
        states = hidden[indices].to(self.draft_device)
        self._root_states |= dict(zip(rows, states, strict=True))

    @property
    def step_graphs(self) -> StepGraphs:
        """See `LevelDrafter`."""
        return self._runner.step_graphs(self._target_rows.pool)

    def prepare_pass(self, state: GenerationState, growth: Growth) -> PreparedStep:
        """See `LevelDrafter`."""
        owners = growth.owners
        if growth.depth == 0:
            tokens = growth.tokens
            states = torch.stack([self._root_states[row] for row in growth.rows])
        else:
            # Placeholders of what follows from the pass before.
            tokens = torch.zeros(len(owners), dtype=torch.long)
            states = self._node_states.new_empty(len(owners), self.assistant.hidden_size)
        return self._runner.prepare(self._target_rows, owners, tokens, states)

    def probabilities(self, state: GenerationState, growth: Growth) -> Tensor:
        """Return the (M, V) distributions of the assistant, from one pass."""
        tokens, states = None, None
        if isinstance(growth, DeviceGrowth):
            prepared = growth.prepared
        else:
            prepared = self.prepare_pass(state, growth)
        if growth.depth:
            tokens, parents = growth.inputs_on(self.draft_device)
            states = self._node_states[parents]
        logits, self._node_states = self._runner.run(prepared, tokens, states)
        return self.processed(state, growth, logits.to(state.device))

    @property
    def _target_rows(self) -> RowStorage:
        assert self._storage is not None, "rows draft after the target has run them"
        return self._storage
