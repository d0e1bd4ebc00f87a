"""Verifiers that change the distribution, and one that changes greedy output: planted mistakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection
from hf_spec.engine.forward.draft_tree import Verdict


class NoResidual(ResidualRejection):
    """After a rejection it draws from the target's distribution itself."""

    @staticmethod
    def _judge(tree: Any, nodes: Any, target: Tensor) -> Tensor:
        return torch.tensor([_first_fit(tree, *one)[0] for one in zip(nodes, target, strict=True)])


class SiblingsWithoutUpdate(ResidualRejection):
    """Every sibling is held against the probabilities that were right for the first."""

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
    """The first child that fits the untouched distributions, else a draw from the target's."""
    for child in tree.children[node]:
        token = tree.tokens[child]
        if float(torch.rand(()) * tree.draft_probs[node, token]) < float(target[token]):
            return token, True
    return int(torch.multinomial(target, 1)), False


class RedrawnBonus(NodeDraw):
    """Draws again where no child carries the token that was drawn."""

    def _step(self, tree: Any, walk: Any, here: Any, paths: Any) -> dict[int, Any]:
        first = super()._step(tree, walk, here, paths)
        second = super()._step(tree, walk, here, paths)
        return {
            row: (token, child) if child is not None else (second[row][0], None)
            for row, (token, child) in first.items()
        }


class OneTooMany(NodeDraw):
    """Accepts one more drafted token than the target agrees with."""

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
