"""Which draft tokens the target accepts, decided on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.verify_tree.reference import verify_tree_ref


@dataclass(frozen=True)
class TreeVerdict:
    """What the target made of B trees.

    Attributes:
        accepted: (B, P) int64, the accepted nodes of each row in path order without the root, as
            indices into the tree, then -1. P is `max_nodes - 1`.
        num_accepted: (B,) int64.
        bonus: (B,) int64, the target's own token after the last accepted one; -1 for a row without
            nodes and where there was nothing to draw.
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
    """Choose one token per visited node and walk to the child that carries it, until none does.

    Without `uniforms` the token is the argmax: the first index of the largest logit. A NaN is
    larger than everything, as in `torch.argmax`; logits that are all -inf give token 0. With them
    the token is drawn from softmax(logits): the first whose cumulative probability exceeds the
    node's uniform. There NaN and -inf have probability 0, and a node whose tokens all do ends the
    walk with -1.

    Args:
        logits: (N, V), processed; any strides but the last, which is 1.
        token_ids: (N,) int64; virtual nodes are negative and never accepted.
        parent: (N,) int64, index into the same arrays, -1 for a root. Of two children with the same
            token the first is taken.
        row_start: (B + 1,) int64, where each row begins.
        max_nodes: most nodes of any row, on the host; a bound is fine.
        uniforms: (N,) float32 in [0, 1), or None for the argmax.
        impl: see the package.
    """
    if not serves(logits, impl):
        found = verify_tree_ref(logits, token_ids, parent, row_start, max_nodes, uniforms)
    else:
        from hf_spec_kernels.verify_tree import kernel

        with torch.cuda.device_of(logits):
            found = kernel.verify_tree(logits, token_ids, parent, row_start, max_nodes, uniforms)
    return TreeVerdict(*found)
