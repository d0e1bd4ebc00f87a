"""Runs a Gemma assistant on the nodes of a batch, in the slots of its target's KV pool.

A pass has no keys and values of its own, so nothing is stored between passes but the states of its
nodes. Each pass is replayed as a CUDA graph where possible. Its graphs read the target's pool, so
they are dropped when the pool moves, and stored for the calls that use the same pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.fast.cuda_graphs import ReadingGraphs
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.forward.vocabulary import fit_logits, num_embeddings
from hf_spec.methods.gemma_assistant.head import GemmaAssistant


class AssistantRunner:
    """An assistant, and the embedding and vocabulary size of its target.

    With `cached`, its graphs are stored for later calls.

    Attributes:
        device: device of the assistant.
        forwards: number of passes so far.
    """

    def __init__(self, assistant: GemmaAssistant, target: PreTrainedModel, cached: bool):
        self.assistant = assistant
        self.device = assistant.device
        self.forwards = 0
        self._embedding: Any = target.get_input_embeddings()
        self._vocab_size = num_embeddings(target)
        self._cached = cached
        self._graphs: ReadingGraphs | None = None

    @contextmanager
    def active(self) -> Iterator[AssistantRunner]:
        """Prepare the assistant for its passes; it is restored when the block ends."""
        with install_packed_linears(self.assistant, rounded=True):
            try:
                yield self
            finally:
                if self._graphs is not None:
                    self._graphs.close()
                    self._graphs = None

    @use_packed_linears(rounded=True)
    def run(
        self,
        storage: RowStorage,
        rows: Sequence[int],
        tokens: Tensor,
        states: Tensor,
        parents: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the (M, V) float32 logits and (M, H) states after M nodes, until the next pass.

        Args:
            storage: the target's rows.
            rows: row of each node, ascending.
            tokens: (M,) int64 tokens of the nodes, on the host or the device.
            states: (P, H) states on the device, those of the parents among them.
            parents: (M,) int64 index of each node's parent in `states`, on the host or the device.
        """
        self.forwards += 1
        segments: list[Segment] = []
        offsets = []
        for row, nodes in groupby(rows):
            start = segments[-1].end if segments else 0
            segment = storage.stored_row(row).query_segment(start, len(list(nodes)))
            offsets.append(segment.position + storage.position_offsets[row])
            segments.append(segment)
        step, positions = PackedStep(storage.pool, segments), torch.cat(offsets)
        inputs = [tokens, positions, parents, states]
        logits, new_states = self._graphs_of(storage).run(self._compute, inputs, step)
        return logits[: len(tokens)], new_states[: len(tokens)]

    def _graphs_of(self, storage: RowStorage) -> ReadingGraphs:
        if self._graphs is None:
            # Not earlier: the pool gets its buffers when the target runs first.
            key = storage.pool.num_slots if self._cached else None
            reads = [self._embedding]
            self._graphs = ReadingGraphs(self.assistant, storage.pool, self.device, reads, key)
        return self._graphs

    def _compute(self, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        tokens, positions, parents, states = tensors
        embedded = self._embedding(tokens).to(self.device)
        logits, new_states = self.assistant(embedded, states[parents], positions, step)
        return [fit_logits(logits.float(), self._vocab_size), new_states]
