"""Runs a Gemma assistant on the nodes of a batch, in the slots of its target's KV pool.

A pass has no keys and values of its own, so nothing is stored between passes but the states of its
nodes. Passes are replayed as CUDA graphs where possible, those of a draft as one. Its graphs read
the target's pool, so they are dropped when the pool moves, and stored for the calls that use the
same pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.fast.cuda_graphs import ReadingGraphs, StepGraphs
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.packing import PreparedStep
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

    # While active, from the first pass on.
    _graphs: ReadingGraphs | None

    def __init__(self, assistant: GemmaAssistant, target: PreTrainedModel, cached: bool):
        self.assistant = assistant
        self.device = assistant.device
        self.forwards = 0
        self._embedding: Any = target.get_input_embeddings()
        self._vocab_size = num_embeddings(target)
        self._cached = cached

    @contextmanager
    def active(self) -> Iterator[AssistantRunner]:
        """Prepare the assistant for its passes; it is restored when the block ends."""
        self._graphs = None
        with install_packed_linears(self.assistant, rounded=True):
            try:
                yield self
            finally:
                if self._graphs is not None:
                    self._graphs.close()

    def step_graphs(self, pool: KVPool) -> StepGraphs:
        """Return the CUDA graphs of the passes over the target's `pool`, once the target has run.

        Only while active.
        """
        if self._graphs is None:
            # Not earlier: the pool gets its buffers when the target runs first.
            key = pool.num_slots if self._cached else None
            self._graphs = ReadingGraphs(self.assistant, pool, self.device, [self._embedding], key)
        return self._graphs

    def prepare(
        self, storage: RowStorage, rows: Sequence[int], tokens: Tensor, states: Tensor
    ) -> PreparedStep:
        """Prepare the pass of M nodes, and count it as run.

        Its tensors are (M,) tokens and positions on the host, and the states.

        Args:
            storage: the target's rows.
            rows: row of each node, ascending.
            tokens: (M,) int64 tokens of the nodes, on the host.
            states: (M, H) states of their parents, on the device.
        """
        self.forwards += 1
        segments: list[Segment] = []
        offsets = []
        for row, nodes in groupby(rows):
            start = segments[-1].end if segments else 0
            segment = storage.stored_row(row).query_segment(start, len(list(nodes)))
            offsets.append(segment.position + storage.position_offsets[row])
            segments.append(segment)
        tensors = [tokens, torch.cat(offsets), states]
        return PreparedStep(PackedStep(storage.pool, segments), tensors)

    @use_packed_linears(rounded=True)
    def run(
        self,
        prepared: PreparedStep,
        tokens: Tensor | None = None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the (M, V) float32 logits and (M, H) states after M nodes, until the next pass.

        `tokens` and `states` replace the prepared ones; both are on the device.
        """
        tensors = list(prepared.tensors)
        if tokens is not None and states is not None:
            tensors[0], tensors[2] = tokens, states
        graphs = self.step_graphs(prepared.step.pool)
        logits, new_states = graphs.run(self._compute, tensors, prepared.step)
        # The results of a graph end with those of its padding.
        return logits[: len(tensors[0])], new_states[: len(tensors[0])]

    def _compute(self, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        tokens, positions, states = tensors
        embedded = self._embedding(tokens).to(self.device)
        logits, new_states = self.assistant(embedded, states, positions, step)
        return [fit_logits(logits.float(), self._vocab_size), new_states]
