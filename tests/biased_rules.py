"""Broken verifiers: three that bias sampling, and one that changes greedy output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection
from hf_spec.engine.forward.draft_tree import Verdict


class NoResidual(ResidualRejection):
    """Verifier that samples from the target, not from the residual, after a rejection."""

    @staticmethod
    def _judge(tree: Any, nodes: Any, target: Tensor) -> Tensor:
        return torch.tensor([_first_fit(tree, *one)[0] for one in zip(nodes, target, strict=True)])


class SiblingsWithoutUpdate(ResidualRejection):
    """Verifier that judges every sibling by the probabilities that apply to the first."""

    @staticmethod
    def _judge(tree: Any, nodes: Any, target: Tensor) -> Tensor:
        found = []
        for node, probs in zip(nodes, target, strict=True):
            token, accepted = _first_fit(tree, node, probs)
            if tree.children[node] and not accepted:
                residual = (probs - tree.draft_probs[node]).clamp(min=0)
                token = int(torch.multinomial(residual, 1))
            found.append(token)
        return torch.tensor(found)


def _first_fit(tree: Any, node: int, target: Tensor) -> tuple[int, bool]:
    """Return the first child that the initial distributions accept, else a target sample.

    The second value is True if a child was accepted.
    """
    for child in tree.children[node]:
        token = tree.tokens[child]
        if float(torch.rand(()) * tree.draft_probs[node, token]) < float(target[token]):
            return token, True
    return int(torch.multinomial(target, 1)), False


class RedrawnBonus(NodeDraw):
    """Verifier that redraws a token that matches no child."""

    def _step(self, tree: Any, walk: Any, here: Any, paths: Any) -> dict[int, Any]:
        first = super()._step(tree, walk, here, paths)
        second = super()._step(tree, walk, here, paths)
        return {
            row: (token, child) if child is not None else (second[row][0], None)
            for row, (token, child) in first.items()
        }


class OneTooMany(NodeDraw):
    """Verifier that accepts one more draft token than the target agrees with."""

    def verify(
        self, tree: Any, logits: Tensor, state: Any, result: Tensor | None = None
    ) -> Verdict:
        verdict = super().verify(tree, logits, state, result)
        accepted = [list(nodes) for nodes in verdict.accepted]
        for row, nodes in enumerate(accepted):
            if verdict.bonus[row] is not None:
                last = nodes[-1] if nodes else tree.row_start[row]
                nodes.extend(tree.proposals(last)[:1])
        return Verdict(tree, accepted, verdict.bonus)
