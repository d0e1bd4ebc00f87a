"""Selection of the accepted draft tokens, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.verify_tree.reference import verify_tree_ref


@dataclass(frozen=True)
class TreeVerdict:
    """Verdict on B trees.

    Attributes:
        accepted: (B, P) int64, indices of each row's accepted nodes in path order without the root,
            padded with -1. P is `max_nodes - 1`.
        num_accepted: (B,) int64.
        bonus: (B,) int64, the target's token after the last accepted one; -1 for a row without
            nodes or without a token of positive probability.
    """

    accepted: Tensor
    num_accepted: Tensor
    bonus: Tensor


def verify_tree(  # noqa: PLR0913 - logits and the fields of a tree
    logits: Tensor,
    token_ids: Tensor,
    parent: Tensor,
    row_start: Tensor,
    max_nodes: int,
    uniforms: Tensor | None = None,
    impl: str = "auto",
) -> TreeVerdict:
    """Select one token per visited node and walk to the child with that token, until none has it.

    Without `uniforms` the token is the argmax, with ties resolved to the first index. NaN is the
    largest value, as in `torch.argmax`; if all logits are -inf, the token is 0. With `uniforms` the
    token is sampled from softmax(logits): the first whose cumulative probability exceeds the node's
    uniform. NaN and -inf then have probability 0, and a node without any other ends the walk
    with -1.

    Args:
        logits: (N, V), processed; with last stride 1.
        token_ids: (N,) int64; virtual nodes are negative and never accepted.
        parent: (N,) int64, index into the same arrays, -1 for a root. Among children with equal
            tokens the first is selected.
        row_start: (B + 1,) int64, start of each row.
        max_nodes: most nodes of a row, or an upper bound, on the host.
        uniforms: (N,) float32 in [0, 1), or None for the argmax.
        impl: see the package.
    """
    if not serves(logits, impl):
        verdict = verify_tree_ref(logits, token_ids, parent, row_start, max_nodes, uniforms)
    else:
        from hf_spec_kernels.verify_tree import kernel

        with torch.cuda.device_of(logits):
            verdict = kernel.verify_tree(logits, token_ids, parent, row_start, max_nodes, uniforms)
    return TreeVerdict(*verdict)
