"""Runs a Gemma assistant on draft nodes, over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import send
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.engine.forward.step import PackedStep
from hf_spec.methods.gemma_assistant.head import GemmaAssistant


class AssistantRunner:
    """Assistant with the states that its next steps start from.

    Between rounds that is one state per row: the target's hidden state of the token before the
    root. `embedding` is the target's.
    """

    # (M, H) states after the nodes of the last pass.
    _node_states: Tensor

    def __init__(self, assistant: GemmaAssistant, embedding: Any):
        self.assistant = assistant
        self.embedding = embedding
        self.forwards = 0
        self._storage: RowStorage | None = None
        self._root_states: dict[int, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[AssistantRunner]:
        """Run the assistant's linear layers with packed weights."""
        with install_packed_linears(self.assistant, rounded=True):
            yield self

    def restart(self, row: int) -> None:
        """Forget the state of a row."""
        self._root_states.pop(row, None)

    def can_draft(self, row: int) -> bool:
        """Return True if the target has run the sequence of a row."""
        return row in self._root_states

    def learn(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Keep the target's state of the token before each next root: the last accepted one."""
        self._storage = output.storage
        tree = verdict.tree
        rows = [row for row in range(tree.num_rows) if tree.nodes(row)]
        last = [[tree.row_start[row], *verdict.accepted[row]][-1] for row in rows]
        hidden = output.hidden[-1]
        (indices,) = send([torch.tensor([output.nodes[node] for node in last])], hidden.device)
        states = hidden[indices].to(self.assistant.norm.weight.device)
        self._root_states |= dict(zip(rows, states, strict=True))

    @property
    def device(self) -> torch.device:
        """Device of the assistant."""
        return self.assistant.norm.weight.device

    @use_packed_linears(rounded=True)
    def run(self, rows: Sequence[int], tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Return the (M, V) logits after M nodes.

        Args:
            rows: row of each node, ascending.
            tokens: (M,) int64, on the host or the assistant's device.
            parents: (M,) int64 index of each node's parent in the last pass, on the host or the
                assistant's device; None for roots.
        """
        self.forwards += 1
        device = self.device
        assert self._storage is not None, "rows draft after the target has run them"
        segments, positions = self._segments(self._storage, rows)
        step = PackedStep(self._storage.pool, segments)
        inputs = [positions, tokens] if parents is None else [positions, tokens, parents]
        sent = iter(send([t for t in inputs if t.device.type == "cpu"], device))
        positions, tokens, *indices = (next(sent) if t.device.type == "cpu" else t for t in inputs)
        if parents is None:
            states = torch.stack([self._root_states[row] for row in rows])
        else:
            states = self._node_states[indices[0]]
        embedded = self.embedding(tokens).to(device)
        logits, self._node_states = self.assistant(embedded, states, positions, step)
        return logits

    @staticmethod
    def _segments(storage: RowStorage, rows: Sequence[int]) -> tuple[list[Segment], Tensor]:
        """Return the stored tokens that the nodes of each row see, and (M,) int64 positions."""
        segments: list[Segment] = []
        positions = []
        for row, nodes in groupby(rows):
            start = segments[-1].end if segments else 0
            segment = storage.stored_row(row).query_segment(start, len(list(nodes)))
            positions.append(segment.position + storage.position_offsets[row])
            segments.append(segment)
        return segments, torch.cat(positions)
