"""Drafts from a head that reads pairs of tokens and of the target's features.

Running the pairs of the accepted tokens already predicts the first level. Every further level takes
one pass over the nodes to expand, on features that the head itself predicted. A head with a mask
pair predicts all levels in its first pass. Keys and values of true pairs stay in the head's KV
cache; those of draft nodes are overwritten in the next round.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import send
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import LevelConfig, LevelDrafter
from hf_spec.drafting.tree_growth import Growth, TreeShape
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.fast.cuda_graphs import StepGraphs, obstacle
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.node_tokens import DeviceTokens
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.packing import PreparedStep
from hf_spec.methods.feature_pairs.draft_head import PairHead, State
from hf_spec.methods.feature_pairs.runner import (
    Blocks,
    HeadRunner,
    PairRow,
    draft_blocks,
    extend_rows,
)


class PairDrafter(LevelDrafter):
    """Grows a chain or a tree per row with a head in evaluation mode.

    `probabilities` is for heads with blocks of one pair. `shape` replaces that of `config`.
    """

    # From `start` on.
    _runner: HeadRunner
    _rows: list[PairRow]
    # (N, k, H) predictions of the last pass over N blocks, and the LSTM's state after it.
    _outputs: Tensor
    _state: State | None

    assisted_refusal_reason = (
        "this head needs the target's features, which assisted decoding does not provide; use "
        "generate() with its spec_strategy"
    )

    def __init__(
        self,
        config: LevelConfig,
        head: PairHead,
        policy: LengthPolicy,
        shape: TreeShape | None = None,
    ):
        super().__init__(config, policy, shape)
        self.head = head
        recorded = () if head.recorder is None else head.recorder.layers
        self.hidden_layers = tuple(dict.fromkeys((*head.hidden_layers, *recorded)))
        self._one_pass = head.mask_pair is not None
        self._num_masks = self.max_depth - 1 if self._one_pass else 0

    def num_forwards(self, depth: int) -> int:
        """Return one per level, or one for all levels with mask pairs."""
        return min(depth, 1) if self._one_pass else depth

    @property
    def timing_key(self) -> Hashable:
        """The head."""
        return id(self.head)

    def start(self, state: GenerationState) -> None:
        """Begin with rows without pairs."""
        super().start(state)
        vocabulary = self.head.head.vocabulary
        if vocabulary is not None:
            self.restrict_vocabulary(vocabulary.to(state.device), self.head.head.full_size)
        self._runner = HeadRunner(self.head, state.num_rows, state.expected_length)
        self.draft_device = self.head.attention.device
        self._head_obstacle = obstacle(self.head.head)
        self._no_features = torch.zeros(0, self.head.hidden_size, device=self.draft_device)
        self._rows = [PairRow(row, self._no_features) for row in range(state.num_rows)]
        self._root_positions = [0] * state.num_rows

    def restart(self, row: int) -> None:
        """Drop the pairs of the row, and reset its policy."""
        super().restart(row)
        self._rows[row] = PairRow(row, self._no_features)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one tree per unfinished row, the root alone of rows with fewer than k pairs."""
        depths = {}
        for row, limit in limits.items():
            self._root_positions[row] = len(state.tokens[row]) - 1
            whole_block = self._rows[row].num_pairs >= self.head.shape.block_size
            depths[row] = limit if whole_block else 0
            if self._one_pass:
                # A policy may draft more than its initial maximum.
                depths[row] = min(depths[row], self._num_masks + 1)
        return super().draft(state, depths)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Add the features of the root and the accepted nodes, and update the policy."""
        super().observe(verdict, output)
        kept_indices = output.committed_indices(verdict)
        state, recorder = self._generation, self.head.recorder
        if recorder is not None and state is not None:
            recorder.record(state.tokens, state.generated, kept_indices, output)
        rows = [self._rows[row] for row in kept_indices]
        for row in rows:
            if row.first < 0:
                row.first = self._root_positions[row.slot] - len(output.pending.get(row.slot, []))
        indices = torch.tensor([index for row in kept_indices.values() for index in row])
        states = [output.hidden[layer] for layer in self.head.hidden_layers]
        # Layers of one target may be on several devices.
        sent = {device: send([indices], device)[0] for device in {s.device for s in states}}
        features = self.head.fuse([state[sent[state.device]] for state in states])
        parts = features.to(self.draft_device).split([len(row) for row in kept_indices.values()])
        extend_rows(rows, parts)

    def probabilities(self, state: GenerationState, growth: Growth) -> Tensor:
        """Return the (M, R) distributions of the head, after the call's processors."""
        if growth.depth == 0 or not self._one_pass:
            self.run_blocks(state, growth)
        outputs = self._outputs[:, 0]
        if self._one_pass:
            # Predictions depend on the depth only, not on the drafted tokens.
            index_of = {row: index for index, row in enumerate(self._fed_rows)}
            indices = torch.tensor([index_of[row] for row in growth.owners])
            (index,) = send([indices], self._outputs.device)
            outputs = self._outputs[index, growth.depth]
        reader = self.head.head
        logits = reader(outputs) if self.processors.reads_tokens else reader.draft_logits(outputs)
        return self.processed(state, growth, logits.to(state.device, torch.float32))

    @property
    def step_graphs(self) -> StepGraphs | None:
        """Return the graphs of the head's steps; None with an LSTM state or mask pairs."""
        alone = self.head.shape.recurrent or self._one_pass or self._head_obstacle is not None
        return None if alone else self._runner.step_graphs

    @property
    def program_key(self) -> Hashable:
        """See `LevelDrafter`; also whether the head returns the logits of all tokens."""
        return super().program_key, self.processors.reads_tokens

    def prepare_pass(self, state: GenerationState, growth: DeviceGrowth) -> PreparedStep | None:
        """See `LevelDrafter`."""
        if self.head.shape.recurrent or self._one_pass:
            return None
        rows = [self._rows[row] for row in growth.rows]
        if growth.depth == 0:
            return self._runner.prepare_feed(rows, state.tokens)
        blocks, seen = self._blocks(growth), growth.visible_bytes
        return self._runner.prepare_grow(rows, blocks, self._outputs, seen)

    def run_blocks(self, state: GenerationState, growth: Growth) -> Tensor:
        """Run a block for each of the N nodes; return (N, k, H) predicted features.

        The blocks of the roots are the newest true pairs; mask pairs follow them, (N, k + M, H).
        The others have the drafted tokens, and the features predicted for their parents' blocks.
        """
        rows = [self._rows[row] for row in growth.rows]
        prepared = growth.prepared if isinstance(growth, DeviceGrowth) else None
        tokens, features = None, None
        if growth.depth == 0:
            self._fed_rows = list(growth.rows)
            if prepared is None:
                self._outputs, self._state = self._runner.feed(rows, state.tokens, self._num_masks)
                return self._outputs
            self._state = None
        else:
            on_device, parents = growth.inputs_on(self.draft_device)
            visible = None if growth.visible is None else growth.visible.to(self.draft_device)
            tokens = DeviceTokens(on_device, visible)
            features = self._outputs[parents].flatten(0, 1)
            if self._state is not None:
                hidden, cell = (part[:, parents] for part in self._state)
                self._state = hidden, cell
            if prepared is None:
                self._outputs, self._state = self._runner.grow(
                    rows, self._blocks(growth), tokens, features, self._state
                )
                return self._outputs
        outputs = self._runner.run_prepared(prepared, tokens, features)
        self._outputs = outputs.view(-1, self.head.shape.block_size, outputs.shape[-1])
        return self._outputs

    def _blocks(self, growth: Growth) -> list[Blocks]:
        """Return per row the blocks that run now."""
        size = self.head.shape.block_size
        return [
            draft_blocks(tuple(growth.expanded_subtree(row)[1]), growth.num_nodes(row), size)
            for row in growth.rows
        ]
