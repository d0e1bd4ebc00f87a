"""Runs a Gemma assistant on nodes of drafts, over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hf_spec.devices.transfer import send
from hf_spec.execution.attention import PackedStep
from hf_spec.execution.cpu_linear import fast_cpu_linears, fast_products
from hf_spec.execution.forward_output import ForwardOutput
from hf_spec.execution.packing import past_segment
from hf_spec.execution.row_storage import RowStorage
from hf_spec.execution.segment import Segment
from hf_spec.execution.tree import Verdict
from hf_spec.heads.gemma_assistant import GemmaAssistant

# A node of a draft: its row and number, its parent's number, -1 for a root, and its token.
Node = tuple[int, int, int, int]


class AssistantRunner:
    """An assistant, and the states that its next steps begin from.

    `embedding` is the target's. Between two rounds there is one state per row, that of the token
    before its root, which the target has computed.
    """

    def __init__(self, assistant: GemmaAssistant, embedding: Any):
        self.assistant = assistant
        self.embedding = embedding
        self.forwards = 0
        self._storage: RowStorage | None = None
        self._known: dict[int, Tensor] = {}
        self._drafted: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[AssistantRunner]:
        """Prepare the assistant; it is as it was found when the block ends."""
        with fast_cpu_linears(self.assistant, rounded=True):
            yield self

    def restart(self, row: int) -> None:
        """A new sequence, of which the target has not said anything."""
        self._known.pop(row, None)

    def can_draft(self, row: int) -> bool:
        """Whether the target has run the sequence of a row."""
        return row in self._known

    def learn(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the target's state of the last token before each root to come."""
        self._storage = output.storage
        tree = verdict.tree
        rows = [row for row in range(tree.num_rows) if tree.nodes(row)]
        last = [[tree.row_start[row], *verdict.accepted[row]][-1] for row in rows]
        hidden = output.hidden[-1]
        (places,) = send([torch.tensor([output.nodes[node] for node in last])], hidden.device)
        states = hidden[places].to(self.assistant.norm.weight.device)
        self._known |= dict(zip(rows, states, strict=True))
        self._drafted = {}

    @fast_products(rounded=True)
    def run(self, nodes: Sequence[Node]) -> Tensor:
        """(M, V) what the assistant says after nodes whose parents have run, row by row."""
        self.forwards += 1
        device = self.assistant.norm.weight.device
        assert self._storage is not None, "rows draft once the target has run them"
        segments, positions = self._segments(self._storage, nodes)
        step = PackedStep(self._storage.pool, (), segments)
        places, tokens = send([positions, torch.tensor([n[3] for n in nodes])], device)
        states = torch.stack(
            [
                self._known[row] if parent < 0 else self._drafted[row, parent]
                for row, _, parent, _ in nodes
            ]
        )
        embedded = self.embedding(tokens).to(device)
        logits, after = self.assistant(embedded, states, places, step)
        keys = [(row, node) for row, node, _, _ in nodes]
        self._drafted |= dict(zip(keys, after, strict=True))
        return logits

    @staticmethod
    def _segments(storage: RowStorage, nodes: Sequence[Node]) -> tuple[list[Segment], Tensor]:
        """What the nodes of each row look at, and (M,) int64 the positions that they stand at."""
        segments: list[Segment] = []
        told = []
        for row, mine in groupby(nodes, key=lambda node: node[0]):
            start = segments[-1].end if segments else 0
            segment = past_segment(storage.past(row), start, len(list(mine)))
            told.append(segment.position + storage.position_offsets[row])
            segments.append(segment)
        return segments, torch.cat(told)
