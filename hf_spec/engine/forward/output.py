"""What a forward of a draft tree gives, and where in it the tokens are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.row_storage import RowStorage


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default indices into `hidden_states` that heads read: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass
class ForwardOutput:
    """Result of a forward.

    What the model gave may be overwritten by the next forward.

    Attributes:
        logits: (M, V) in the model's dtype, one row per node that was run, in tree order.
        hidden: hidden-state index -> (T, hidden size) of all tokens run, pending ones included.
        pending: per row where its pending tokens are among the T, without the root.
        nodes: (M,) where each node is among the T.
        storage: where the keys and values of what is committed are.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    storage: RowStorage | None = None

    def kept_places(self, verdict: Verdict) -> dict[int, list[int]]:
        """Per row that was run where its pending tokens, root and accepted nodes are in the T."""
        starts = verdict.tree.row_start
        return {
            row: self.pending.get(row, []) + [self.nodes[n] for n in (starts[row], *accepted)]
            for row, accepted in enumerate(verdict.accepted)
            if verdict.tree.nodes(row)
        }

    def put_after(self, earlier: ForwardOutput) -> None:
        """Join the hidden states of an earlier stretch of the same prompt in front of these."""
        for layer, states in earlier.hidden.items():
            shift = states.shape[0]
            self.hidden[layer] = torch.cat([states, self.hidden[layer]])
        if not earlier.hidden:
            return
        self.nodes = [place + shift for place in self.nodes]
        places = {row: [place + shift for place in mine] for row, mine in self.pending.items()}
        self.pending = {
            row: earlier.pending.get(row, []) + places.get(row, [])
            for row in {**earlier.pending, **places}
        }
