"""Runs a Gemma assistant on nodes of drafts, over the target's own keys and values."""

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
    """An assistant, and the states that its next steps begin from.

    `embedding` is the target's. Between two rounds there is one state per row, that of the token
    before its root, which the target has computed.
    """

    # The states after the nodes of the newest level.
    _after: Tensor

    def __init__(self, assistant: GemmaAssistant, embedding: Any):
        self.assistant = assistant
        self.embedding = embedding
        self.forwards = 0
        self._storage: RowStorage | None = None
        self._known: dict[int, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[AssistantRunner]:
        """Prepare the assistant; it is as it was found when the block ends."""
        with install_packed_linears(self.assistant, rounded=True):
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

    @property
    def device(self) -> torch.device:
        """The assistant's."""
        return self.assistant.norm.weight.device

    @use_packed_linears(rounded=True)
    def run(self, rows: Sequence[int], tokens: Tensor, above: Tensor | None) -> Tensor:
        """(M, V) what the assistant says after nodes of these rows, which are in order.

        Args:
            rows: of each node.
            tokens: (M,) int64, on the host or the assistant's device.
            above: (M,) int64 likewise, where their parents were in the run before; None of roots.
        """
        self.forwards += 1
        device = self.device
        assert self._storage is not None, "rows draft once the target has run them"
        segments, positions = self._segments(self._storage, rows)
        step = PackedStep(self._storage.pool, segments)
        given = [positions, tokens] if above is None else [positions, tokens, above]
        sent = iter(send([t for t in given if t.device.type == "cpu"], device))
        places, tokens, *parents = (next(sent) if t.device.type == "cpu" else t for t in given)
        if above is None:
            states = torch.stack([self._known[row] for row in rows])
        else:
            states = self._after[parents[0]]
        embedded = self.embedding(tokens).to(device)
        logits, self._after = self.assistant(embedded, states, places, step)
        return logits

    @staticmethod
    def _segments(storage: RowStorage, rows: Sequence[int]) -> tuple[list[Segment], Tensor]:
        """What the nodes of each row look at, and (M,) int64 the positions that they stand at."""
        segments: list[Segment] = []
        told = []
        for row, mine in groupby(rows):
            start = segments[-1].end if segments else 0
            segment = storage.stored_row(row).query_segment(start, len(list(mine)))
            told.append(segment.position + storage.position_offsets[row])
            segments.append(segment)
        return segments, torch.cat(told)
