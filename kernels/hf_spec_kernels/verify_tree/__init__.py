"""Selection of the accepted draft tokens, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.verify_tree.reference import verify_tree_ref


@dataclass(frozen=True)
class TreeVerdict:
    """Verdict on B trees, in one tensor for one transfer.

    Attributes:
        packed: (B, 2 + P) int64: `num_accepted`, `bonus`, and `accepted` of each row. P is
            `max_nodes - 1`.
    """

    packed: Tensor

    @property
    def num_accepted(self) -> Tensor:
        """(B,) number of accepted nodes."""
        return self.packed[:, 0]

    @property
    def bonus(self) -> Tensor:
        """(B,) the target's token after the last accepted one.

        -1 for a row without nodes, or where the scores define no distribution.
        """
        return self.packed[:, 1]

    @property
    def accepted(self) -> Tensor:
        """(B, P) accepted nodes in path order without the root, padded with -1."""
        return self.packed[:, 2:]


def verify_tree(  # noqa: PLR0913 - logits and the fields of a tree
    logits: Tensor,
    token_ids: Tensor,
    parent: Tensor,
    row_start: Tensor,
    max_nodes: int,
    uniforms: Tensor | None = None,
    draft_probs: Tensor | None = None,
    impl: str = "auto",
) -> TreeVerdict:
    """Select one token per visited node and walk to the child with that token, until none has it.

    Without `uniforms` the token is the argmax, with ties resolved to the first index. NaN is the
    largest value, as in `torch.argmax`; if all logits are -inf, the token is 0.

    With `uniforms` the token is sampled from p = softmax(logits): the first whose cumulative
    probability exceeds the node's uniform. A node whose softmax is undefined, since its logits have
    NaN, +inf, or only -inf, ends the walk with -1.

    With `draft_probs`, too, the children were drawn from q without replacement, in their order. A
    child x is accepted if u q(x) < p(x); otherwise p <- norm(max(p - q, 0)), q <- norm(q without
    x), and its sibling follows. If none is accepted, the token is sampled from p (Leviathan et al.
    2023, arXiv 2211.17192, Alg. 1).

    Args:
        logits: (N, V), processed; with last stride 1.
        token_ids: (N,) int64; virtual nodes are negative and never accepted.
        parent: (N,) int64, index into the same arrays, -1 for a root. Among children with equal
            tokens the first is selected.
        row_start: (B + 1,) int64, start of each row.
        max_nodes: most nodes of a row, or an upper bound, on the host.
        uniforms: None for the argmax; (N,) float32 in [0, 1) to sample; (N, 2) with `draft_probs`:
            one to sample after the node, one to accept it.
        draft_probs: (N, V) float32 with last stride 1; row i is the distribution that the children
            of node i were drawn from.
        impl: see the package.
    """
    tree = (token_ids, parent, row_start, max_nodes, uniforms, draft_probs)
    if not serves(logits, impl):
        return TreeVerdict(verify_tree_ref(logits, *tree))
    from hf_spec_kernels.verify_tree import kernel

    with torch.cuda.device_of(logits):
        return TreeVerdict(kernel.verify_tree(logits, *tree))
