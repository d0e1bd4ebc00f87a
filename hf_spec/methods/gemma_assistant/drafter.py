"""Drafts from a Gemma 4 assistant, which attends to the target's KV cache and has none itself.

Google publishes one for every Gemma 4. It stores nothing between rounds: a step reads a token, the
hidden state of its parent and the target's KV cache (`hf_spec.methods.gemma_assistant.head`). So a
level of a tree is one pass of any width, and accepted tokens need no further pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.backend.device.transfer import send
from hf_spec.drafting.config import AssistantConfig
from hf_spec.drafting.cost_model.cost_model_drafter import with_policy
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import BeamConfig, LevelDrafter
from hf_spec.drafting.tree_growth import Growth
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.forward.vocabulary import fit_logits, num_embeddings
from hf_spec.methods.gemma_assistant.head import FAMILY, STRATEGY, GemmaAssistant
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.registry import register


def _make(config: GemmaAssistantConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    head = resolve_published(STRATEGY, assistant, target, (FAMILY,))
    make = partial(GemmaAssistantDrafter, assistant=head, target=target)
    return with_policy(config, target, make, config.shape.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    # `auto` chooses the nodes to send.
    whole = GemmaAssistantConfig(
        max_draft_tokens=5, max_nodes=24, tree="dynamic", batching=auto.batching
    )
    return _make(whole, target, assistant)


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
        self._embedding: Any = target.get_input_embeddings()
        self._vocab_size = num_embeddings(target)
        self._forwards = 0

    @property
    def forwards(self) -> int:
        """Passes of the assistant so far."""
        return self._forwards

    @property
    def timing_key(self) -> Hashable:
        """The assistant."""
        return id(self.assistant)

    def start(self, state: GenerationState) -> None:
        """Begin without hidden states of any row."""
        super().start(state)
        self.draft_device = self.assistant.norm.weight.device
        self._forwards = 0
        self._storage: RowStorage | None = None
        self._root_states: dict[int, Tensor] = {}

    @contextmanager
    def active(self, state: GenerationState) -> Iterator[None]:
        """Run the assistant's linear layers with packed weights."""
        with super().active(state), install_packed_linears(self.assistant, rounded=True):
            yield

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

    def probabilities(self, state: GenerationState, growth: Growth) -> Tensor:
        """Return the (M, V) distributions of the assistant, from one pass."""
        tokens, parents = growth.tokens, growth.parents if growth.depth else None
        if growth.tokens_on_device:
            tokens, parents = growth.inputs_on(self.draft_device)
        logits = self._run(growth.owners, tokens, parents)
        logits = fit_logits(logits.to(state.device, torch.float32), self._vocab_size)
        return self.processed(state, growth, logits)

    @use_packed_linears(rounded=True)
    def _run(self, rows: Sequence[int], tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Return the (M, V) logits after M nodes of `rows`, in ascending order.

        `parents` are the (M,) int64 indices of the nodes' parents in the last pass, None for roots.
        Tokens and parents may be on the host.
        """
        self._forwards += 1
        assert self._storage is not None, "rows draft after the target has run them"
        segments: list[Segment] = []
        offsets = []
        for row, nodes in groupby(rows):
            start = segments[-1].end if segments else 0
            segment = self._storage.stored_row(row).query_segment(start, len(list(nodes)))
            offsets.append(segment.position + self._storage.position_offsets[row])
            segments.append(segment)
        step, positions = PackedStep(self._storage.pool, segments), torch.cat(offsets)
        inputs = [positions, tokens] if parents is None else [positions, tokens, parents]
        sent = iter(send([t for t in inputs if t.device.type == "cpu"], self.draft_device))
        positions, tokens, *indices = (next(sent) if t.device.type == "cpu" else t for t in inputs)
        if parents is None:
            states = torch.stack([self._root_states[row] for row in rows])
        else:
            states = self._node_states[indices[0]]
        embedded = self._embedding(tokens).to(self.draft_device)
        logits, self._node_states = self.assistant(embedded, states, positions, step)
        return logits
