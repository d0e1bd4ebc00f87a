"""Drafts from a head that reads pairs of tokens and of the target's features, level by level.

Catching up with what was accepted already gives the first level, each further one takes a pass
over the tokens that are drafted on; a head with mask tokens gives all of them in its first pass.
Keys and values of true pairs stay, those of a draft rest on predicted features and are overwritten
in the next round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hf_spec.backend.device import transfer
from hf_spec.backend.device.transfer import send
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import Graphs, LevelConfig, LevelDrafter, Owners
from hf_spec.drafting.tree_growth import expanded_subtree
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.device_tokens import DeviceTokens
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.feature_pairs.rows import PairRows, StateReader
from hf_spec.methods.feature_pairs.runner import Blocks, HeadRunner, MaskTokens, PairHead


class FeatureHead(PairHead, StateReader, Protocol):
    """A head that drafts token by token, or all of them in one pass."""

    def mask_tokens(self, count: int) -> MaskTokens | None:
        """Return `count` mask pairs that draft in one pass; None to draft step by step."""


class PairDrafter(LevelDrafter):
    """Grows a chain or a tree per row with a head of blocks of one pair, in evaluation mode."""

    # From `start` on.
    _runner: HeadRunner
    _pairs: PairRows
    # Of the newest level: what was predicted, and where what follows each (row, node) is.
    _outputs: Tensor
    _places: dict[tuple[int, int], int]

    assisted_refusal_reason = (
        "this head needs the target's features, which assisted decoding does not hand on; use "
        "generate() with its spec_strategy"
    )

    def __init__(self, config: LevelConfig, head: FeatureHead, policy: LengthPolicy):
        super().__init__(config, policy)
        self.head = head
        self.hidden_layers = tuple(dict.fromkeys(head.hidden_layers))
        self._ahead = head.mask_tokens(self.max_depth - 1)

    def num_forwards(self, depth: int) -> int:
        """One a level; one for all from a head with mask tokens."""
        return depth if self._ahead is None else min(depth, 1)

    @property
    def timing_key(self) -> Hashable:
        """The head."""
        return id(self.head)

    def start(self, state: GenerationState) -> None:
        """Rows without pairs."""
        super().start(state)
        self.draft_few(self.head.head, state.device)
        self._runner = HeadRunner(self.head, state.num_rows, state.expected_length)
        device: torch.device = self.head.attention.device
        self._pairs = PairRows(state.num_rows, self.head.hidden_size, device)

    def restart(self, row: int) -> None:
        """One row without pairs, and a policy that knows nothing of it."""
        super().restart(row)
        self._pairs.restart(row)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, the root alone where no feature is known yet."""
        known = {}
        for row, limit in limits.items():
            self._pairs.roots[row] = len(state.tokens[row]) - 1
            known[row] = limit if self._pairs.rows[row].num_pairs else 0
            if self._ahead is not None:
                # A policy may go beyond what it was given.
                known[row] = min(known[row], len(self._ahead.features) + 1)
        return super().draft(state, known)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the features of the root and of what was accepted; tell the policy."""
        super().observe(verdict, output)
        self._pairs.learn(verdict, output, self.head)

    def probabilities(self, state: GenerationState, graphs: Graphs, owners: Owners) -> Tensor:
        """(nodes, R) float32: what the head says of each (row, node)."""
        if owners[0][1] == 0:
            self._feed(state, list(graphs))
        elif self._ahead is None:
            self._grow_level(graphs, owners)
        places = [self._place(graphs, row, node) for row, node in owners]
        logits = self._read(self._gathered(places), state.device)
        return self.processed(state, graphs, owners, logits)

    @property
    def supports_device_growth(self) -> bool:
        """On a GPU."""
        return self._pairs.device.type in transfer.ASYNCHRONOUS

    def propose_on_device(self, state: GenerationState, growing: DeviceGrowth) -> Tensor:
        """(nodes, R) float32: what the head says of each node that runs next."""
        tokens = growing.tokens
        if tokens is None:
            self._feed(state, growing.rows)
        if tokens is None or self._ahead is not None:
            outputs = self._gathered(
                [self._places[row, 0] + growing.depth for row in growing.owners]
            )
        else:
            device = self._pairs.device
            above = growing.above.to(device)
            features = self._outputs[above]
            rows = [self._pairs.rows[row] for row in growing.rows]
            blocks = [_blocks(growing.parents, growing.width)] * len(rows)
            given = DeviceTokens(tokens, growing.sees).to(device)
            outputs = self._outputs = self._runner.grow_each(rows, blocks, given, features)
        return self.processed_unread(growing.owners, self._read(outputs, state.device))

    def _feed(self, state: GenerationState, growing: Sequence[int]) -> None:
        """Run the newest pairs of the rows that grow, and what stands for tokens to come."""
        rows = [self._pairs.rows[row] for row in growing]
        fed, _ = self._runner.feed(rows, state.tokens, self._ahead)
        self._outputs = fed.flatten(0, 1)
        self._places = {(row, 0): index * fed.shape[1] for index, row in enumerate(growing)}

    def _place(self, graphs: Graphs, row: int, node: int) -> int:
        """Which output says what follows a node."""
        if self._ahead is None:
            return self._places[row, node]
        # What follows depends on how far it is alone.
        return self._places[row, 0] + graphs[row].depth[node]

    def _gathered(self, places: Sequence[int]) -> Tensor:
        (index,) = send([torch.tensor(places)], self._outputs.device)
        return self._outputs[index]

    def _grow_level(self, graphs: Graphs, owners: Owners) -> None:
        """Run the newest nodes, each on what its parent's output predicts."""
        features = self._gathered([self._places[r, graphs[r].parents[n]] for r, n in owners])
        tokens = torch.tensor([graphs[row].tokens[node] for row, node in owners])
        counts = Counter(row for row, _ in owners)
        blocks = [
            _blocks(expanded_subtree(graph, self.ran[row])[1], counts[row])
            for row, graph in graphs.items()
        ]
        rows = [self._pairs.rows[row] for row in graphs]
        self._outputs = self._runner.grow_each(rows, blocks, DeviceTokens(tokens), features)
        self._places = {owner: index for index, owner in enumerate(owners)}

    def _read(self, outputs: Tensor, device: torch.device) -> Tensor:
        """(nodes, R) float32 logits, of all tokens where a processor asks which they are."""
        reader = self.head.head
        logits = reader(outputs) if self.processors.reads_tokens else reader.known(outputs)
        return logits.to(device, torch.float32)


def _blocks(parents: Sequence[int], count: int) -> Blocks:
    """Where the newest nodes stand among all that ran below the root, and which they see.

    `parents` are of the root and of each of those, the root's own being -1.
    """
    # The tokens do not matter.
    tree = DraftTree.from_rows([([0] * len(parents), parents)])
    visible = tree.ancestor_mask[-count:, 1:]
    offsets = torch.tensor(tree.depth[1:]) - 1
    begin = len(parents) - 1 - count
    whole = bool(visible.all())
    return Blocks(begin, count, tree.depth[-1] - 1, offsets, None if whole else visible)
