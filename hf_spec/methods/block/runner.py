"""Runs a block head on the rows of a batch, with a key/value slot per row.

Each layer stores one key and value per committed token, in order of position. A block is stored
after them and overwritten by the next round. All rows run in one packed pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from hf_spec_kernels import kv_write
from torch import Tensor

from hf_spec.backend.device.transfer import send
from hf_spec.drafting.one_pass_drafter import Proposals
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.forward.kernel_layout import slot_mapping
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.step import PackedStep
from hf_spec.methods.block.head import BlockHead, keys_values
from hf_spec.methods.feature_pairs.runner import newest_segment

# Tokens per projection of hidden states to context vectors; bounds memory on long prompts.
CONTEXT_CHUNK = 4096


class BlockRunner:
    """Block head with the context of `num_rows` sequences; implements `ProposalRunner`.

    For `expected_length` see `ModelRunner`.
    """

    def __init__(self, head: BlockHead, num_rows: int, expected_length: int = 0):
        self.head = head
        self.pool = KVPool(num_rows)
        self.forwards = 0
        self.device = head.device
        self._expected_length = expected_length
        # Per row: position of the first context vector (-1: none), number of vectors with stored
        # keys and values, and vectors without.
        self._first = [-1] * num_rows
        self._stored = [0] * num_rows
        self._waiting: dict[int, list[Tensor]] = {}
        self._causal = tuple(dict.fromkeys(head.shape.causal))

    @contextmanager
    def active(self) -> Iterator[BlockRunner]:
        """Prepare the head for packed passes; undo that at the end."""
        with ExitStack() as stack:
            stack.enter_context(install_packed_linears(self.head, rounded=True))
            head: Any = self.head
            self._graphs = StepGraphs(
                head,
                self.pool,
                self.device,
                cache_key=self.pool.num_slots if self._expected_length else None,
                length=self._expected_length,
            )
            stack.callback(self._graphs.close)
            yield self

    def restart(self, row: int) -> None:
        """Forget the context of a row."""
        self._first[row], self._stored[row] = -1, 0
        self._waiting.pop(row, None)

    def knows(self, row: int) -> bool:
        """Return True if the row has context."""
        return self._first[row] >= 0

    @use_packed_linears(rounded=True)
    def learn(self, spans: Mapping[int, tuple[int, int]], states: Sequence[Tensor]) -> None:
        """See `ProposalRunner`."""
        parts = zip(*(layer.split(CONTEXT_CHUNK) for layer in states), strict=True)
        context = torch.cat([self.head.context(part) for part in parts])
        counts = [count for _, count in spans.values()]
        for (row, (first, _)), part in zip(spans.items(), context.split(counts), strict=True):
            if not self.knows(row):
                self._first[row] = first
            self._waiting.setdefault(row, []).append(part)

    @use_packed_linears(rounded=True)
    def propose(self, roots: Mapping[int, int], depth: int) -> Proposals:
        """See `ProposalRunner`; runs one block per row in one pass."""
        self._store_context([row for row in roots if row in self._waiting])
        outputs = self._run(roots).view(len(roots), self.head.shape.block_size, -1)
        return BlockProposals(self.head, outputs, torch.tensor(list(roots.values())), depth)

    def _store_context(self, rows: Sequence[int]) -> None:
        """Compute and store keys and values of the new context, in every layer."""
        if not rows:
            return
        context = torch.cat([part for row in rows for part in self._waiting[row]])
        runs, positions = [], []
        for row in rows:
            begin = self._stored[row]
            self._stored[row] += sum(map(len, self._waiting.pop(row)))
            runs.append((row, range(begin, self._stored[row])))
            positions.append(torch.arange(begin, self._stored[row]) + self._first[row])
        self.pool.reserve(max(self._stored))
        position, mapping = send([torch.cat(positions), slot_mapping(runs)], self.device)
        rotation = self.head.rotation(position)
        for index, layer in enumerate(self.head.layers):
            key, value = keys_values(layer.self_attn, context, rotation)
            keys, values = self.pool.layer(index, key[None], value[None])
            kv_write(key.transpose(0, 1), value.transpose(0, 1), keys, values, mapping)

    def _run(self, roots: Mapping[int, int]) -> Tensor:
        """Return the (A * b, width) outputs of the blocks that start at the rows' last tokens."""
        self.forwards += 1
        size = self.head.shape.block_size
        self.pool.reserve(max(self._stored[row] for row in roots) + size)
        masks = [self.head.shape.mask_token_id] * (size - 1)
        tokens = torch.tensor([token for root in roots.values() for token in (root, *masks)])
        steps = {causal: self._step(list(roots), causal) for causal in self._causal}
        first = next(iter(steps.values()))
        positions = torch.cat([segment.position for segment in first.segments])
        tensors = [tokens, positions]
        if len(steps) == 1:
            (outputs,) = self._graphs.run(
                lambda inputs, step: [self._compute(inputs, dict.fromkeys(steps, step))],
                tensors,
                first,
            )
            return outputs[: len(tokens)]
        # A CUDA graph supports one step only.
        return self._compute(send(tensors, self.device), steps)

    def _compute(self, tensors: Sequence[Tensor], steps: Mapping[bool, PackedStep]) -> Tensor:
        tokens, positions = tensors
        hidden = self.head.embed(tokens)
        return self.head(hidden, self.head.rotation(positions), steps)

    def _step(self, rows: Sequence[int], causal: bool) -> PackedStep:
        """Return the step of the rows' blocks in causal layers, or in others."""
        size = self.head.shape.block_size
        segments = []
        for index, row in enumerate(rows):
            stored = self._stored[row]
            positions = torch.arange(stored, stored + size) + self._first[row]
            seen = torch.ones(size, size, dtype=torch.bool).tril() if causal else None
            segments.append(newest_segment(row, index * size, stored, positions, size, seen))
        return PackedStep(self.pool, segments)


class BlockProposals(Proposals):
    """Draft distributions from (A, b, width) outputs.

    With a Markov head or a selector they depend on the tokens before.
    """

    def __init__(self, head: BlockHead, outputs: Tensor, roots: Tensor, depth: int):
        first = 0 if head.shape.from_anchor else 1
        self._head = head
        self._outputs = outputs[:, first : first + depth]
        self._logits = head.logits(self._outputs)
        self._state: Tensor | None = None
        if (markov := head.markov) is not None:
            state = outputs.new_zeros(len(outputs), markov.rank)
            if first:
                # The Markov head was trained to read position 0 even where it drafts nothing.
                _, state = markov(markov.embed(roots.to(outputs.device)), outputs[:, 0], state)
            self._state = state

    @use_packed_linears(rounded=True)
    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `Proposals`."""
        rows, level = self._descend(parents)
        outputs, logits = self._outputs[rows, level], self._logits[rows, level]
        before: Tensor | None = None
        if self._state is not None:
            assert self._head.markov is not None, "the state is its"
            before = self._head.markov.embed(tokens)
            bias, self._state = self._head.markov(before, outputs, self._state[parents])
            logits = logits + bias
        if self._head.confidence is not None:
            self.confidence = self._head.confidence(outputs, before)
        logits = self._head.output.over_vocabulary(logits)
        if self._head.selector is not None:
            logits = self._head.selector(tokens, outputs, logits)
        return logits
