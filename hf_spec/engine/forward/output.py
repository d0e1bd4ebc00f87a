"""Result of a forward pass over a draft tree, and the indices of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.row_storage import RowStorage


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default indices into `hidden_states` for heads: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class Readout:
    """Values to read from the logits of a step.

    Attributes:
        best_only: True if it is the best logit of each node and no other.
        compute: function of the logits and of `tensors` on the device, which may both end with
            padding. A hashable key of its operations, which must not synchronize.
        tensors: inputs on the host or the device, with one line per node or row.
    """

    best_only: bool = False
    compute: Callable[[Tensor, Sequence[Tensor]], Tensor] | None = None
    tensors: Sequence[Tensor] = ()


ALL_LOGITS = Readout()


@dataclass
class ForwardOutput:
    """Result of a forward pass; the next one may overwrite its tensors.

    Attributes:
        logits: (M, V) in the model's dtype, one line per node that ran, in tree order. If
            `best_only` logits were read, those other than the largest may be -inf.
        hidden: index into `hidden_states` -> (T, hidden size) of all tokens that ran.
        pending: row -> indices of its pending tokens among the T, without the root.
        nodes: M indices of the nodes among the T.
        storage: keys and values of the committed tokens.
        result: that of `Readout.compute` if it ran with the step.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    storage: RowStorage | None = None
    result: Tensor | None = None

    def committed_indices(self, verdict: Verdict) -> dict[int, list[int]]:
        """Return row -> indices among the T of its pending tokens, root and accepted nodes."""
        starts = verdict.tree.row_start
        return {
            row: self.pending.get(row, []) + [self.nodes[n] for n in (starts[row], *accepted)]
            for row, accepted in enumerate(verdict.accepted)
            if verdict.tree.nodes(row)
        }

    def put_after(self, earlier: ForwardOutput) -> None:
        """Prepend the hidden states of an earlier chunk of the same prompt."""
        for layer, states in earlier.hidden.items():
            shift = states.shape[0]
            self.hidden[layer] = torch.cat([states, self.hidden[layer]])
        if not earlier.hidden:
            return
        self.nodes = [index + shift for index in self.nodes]
        later = {row: [index + shift for index in ids] for row, ids in self.pending.items()}
        self.pending = {
            row: earlier.pending.get(row, []) + later.get(row, [])
            for row in {**earlier.pending, **later}
        }
