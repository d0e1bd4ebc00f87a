"""Verifiers: which draft tokens the target accepts, without changing what it would say.

Both walk each row's tree from its root. At a node, p is the target's distribution for the next
token there, after every processor of the user, evaluated with that node's own prefix.

===================  ============================================================================
`NodeDraw`           draw x ~ p (greedy: the argmax). If a child carries x, go there; otherwise
                     emit x and stop. Exact for every draft that does not depend on these draws.
`ResidualRejection`  for children drawn from q without replacement: accept a child x when
                     u q(x) < p(x), u uniform; otherwise p <- norm(max(p - q, 0)), q <- norm(q
                     without x) and on to its sibling; if none is left, emit a draw from p.
                     (Leviathan et al. 2023, arXiv 2211.17192, Alg. 1; siblings as in Miao et al.
                     2024, arXiv 2305.09781, with sampling without replacement.)
===================  ============================================================================

On a CPU nodes are looked at one level after the other, and none that the walk does not reach. On a
GPU every level would wait for the one before, so all nodes are judged at once and the host learns
the outcome in one transfer, unless a processor reads prefixes or the scores are wanted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from hf_spec_kernels import serves, verify_tree
from torch import Tensor
from transformers import LogitsProcessor

from hf_spec.backend.device.transfer import fetch, send
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.decode.sampling import draw_or_none
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict


class Verifier(LogitsProcessor):
    """Judges draft trees; as a logits processor it is the user's processors in one."""

    def __init__(self, processors: Sequence[Any], num_rows: int):
        self.processors = NodeProcessors(processors, num_rows)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process (B, V) scores of the rows whose (B, L) ids are given, as plain generate does."""
        return self.processors(range(input_ids.shape[0]), list(input_ids), scores)

    def verify(self, tree: DraftTree, logits: Tensor, state: GenerationState) -> Verdict:
        """Walk every unfinished row down its tree, by the target's (N, V) logits of its N nodes.

        Returns:
            Accepted nodes and the bonus token per row, with scores if the state keeps them.
        """
        walk = Walk(self.processors, logits, state)
        accepted: list[list[int]] = [[] for _ in range(tree.num_rows)]
        bonus: list[int | None] = [None] * tree.num_rows
        here = {row: tree.row_start[row] for row in state.unfinished}
        self._begin(tree, walk)
        # One level per turn, all rows together; rows drop out where the target disagrees.
        while here:
            paths = {row: [tree.tokens[node] for node in accepted[row]] for row in here}
            for row, (token, node) in self._step(tree, walk, here, paths).items():
                if token < 0:
                    state.fail(row, _undefined(row))
                if row in state.errors:
                    # The verdict is not committed, but drafters read it.
                    bonus[row] = tree.tokens[tree.row_start[row]]
                elif node is None:
                    bonus[row] = token
                else:
                    accepted[row].append(node)
                    if state.stop.ends_sequence(token):
                        # Plain generate() does not compute this token; the stop rule cuts it off.
                        bonus[row] = token
            here = {row: accepted[row][-1] for row in here if bonus[row] is None}
        return Verdict(
            tree,
            accepted,
            bonus,
            walk.scores if state.keep_scores else None,
            walk.logits if state.keep_logits else None,
        )

    def _begin(self, tree: DraftTree, walk: Walk) -> None:
        """Prepare what can be computed for all nodes at once."""

    def _at_once(self, logits: Tensor, state: GenerationState) -> bool:
        """Whether all nodes are judged together, on a GPU."""
        by_level = self.processors.reads_prefix or state.keep_scores or state.keep_logits
        return serves(logits) and not by_level

    @abstractmethod
    def _step(
        self, tree: DraftTree, walk: Walk, here: dict[int, int], paths: dict[int, list[int]]
    ) -> dict[int, tuple[int, int | None]]:
        """Per row the token that follows its current node, and the child that carries it if any.

        The token is -1 where the scores of a row that draws define no distribution.
        """


class Walk:
    """The target's scores along the way, processed for the nodes that are visited and no others."""

    def __init__(self, processors: NodeProcessors, logits: Tensor, state: GenerationState):
        self.processors = processors
        self.raw = logits
        self.state = state
        self.scores: list[list[Tensor]] = [[] for _ in range(state.num_rows)]
        self.logits: list[list[Tensor]] = [[] for _ in range(state.num_rows)]
        self.choice: list[int] | None = None

    def look(
        self, rows: Sequence[int], nodes: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """(M, V) float32 processed scores of any nodes, by their rows and paths; nothing is kept.

        A path has the tokens from the root's child down to the node.
        """
        raw = self.raw[nodes].to(self.state.device, torch.float32, copy=True)
        prefixes = self.state.prefixes(rows, paths) if self.processors.reads_prefix else None
        return self.processors(rows, prefixes, raw)

    def look_at_all(self, tree: DraftTree) -> Tensor:
        """(N, V) processed scores of all nodes, where no processor reads a prefix."""
        if self.processors.idle:
            return self.raw
        rows = rows_of(tree)
        raw = self.raw.to(self.state.device, torch.float32, copy=True)
        return self.processors(rows, None, raw)

    def follow(self, tree: DraftTree, here: dict[int, int]) -> dict[int, tuple[int, int | None]]:
        """Per row what was chosen at its current node, and the child that carries it."""
        assert self.choice is not None, "asked for where all nodes were judged"
        return carried(tree, here, [self.choice[node] for node in here.values()])

    def visit(self, here: dict[int, int], paths: dict[int, list[int]]) -> Tensor:
        """(len(here), V) float32 processed scores of the current nodes, kept if anybody asked."""
        rows, nodes = list(here), list(here.values())
        if self.state.keep_logits:
            raw = self.raw[nodes].to(self.state.device, torch.float32, copy=True)
            for row, logits in zip(rows, raw, strict=True):
                self.logits[row].append(logits)
        scores = self.look(rows, nodes, [paths[row] for row in rows])
        if self.state.keep_scores:
            for row, score in zip(rows, scores, strict=True):
                self.scores[row].append(score)
        return scores


class NodeDraw(Verifier):
    """One draw per node; see the module. Greedy decoding is the case where the draw is certain.

    Rows that draw may stand beside rows that do not: drafts here depend on neither.
    """

    def verify(self, tree: DraftTree, logits: Tensor, state: GenerationState) -> Verdict:
        """See `Verifier`; a GPU draws and walks by itself where it can."""
        if not self._at_once(logits, state):
            return super().verify(tree, logits, state)
        scores = Walk(self.processors, logits, state).look_at_all(tree)
        return _walk_on_device(tree, scores, state)

    def _begin(self, tree: DraftTree, walk: Walk) -> None:
        state = walk.state
        wanted = state.drawing or state.keep_scores or state.keep_logits
        if self.processors.idle and not wanted:
            walk.choice = walk.raw.argmax(dim=-1).tolist()

    def _step(
        self, tree: DraftTree, walk: Walk, here: dict[int, int], paths: dict[int, list[int]]
    ) -> dict[int, tuple[int, int | None]]:
        if walk.choice is not None:
            return walk.follow(tree, here)
        scores = walk.visit(here, paths)
        if walk.state.drawing:
            scores = _decided(scores, list(here), walk.state)
            tokens = draw_or_none(scores.softmax(dim=-1)).tolist()
        else:
            tokens = scores.argmax(dim=-1).tolist()
        return carried(tree, here, tokens)


def _undefined(row: int) -> RuntimeError:
    return RuntimeError(
        f"row {row}: no token can be drawn, since the probability tensor contains inf or nan after "
        "the logits processors; check temperature and the other sampling settings"
    )


def rows_of(tree: DraftTree) -> list[int]:
    """The row of every node."""
    return [row for row in range(tree.num_rows) for _ in tree.nodes(row)]


def _decided(scores: Tensor, rows: Sequence[int], state: GenerationState) -> Tensor:
    """(M, V) scores to draw from: rows that do not draw keep their most likely token alone."""
    certain = [place for place, row in enumerate(rows) if not state.draws[row]]
    if not certain:
        return scores
    best = scores[certain].argmax(dim=-1, keepdim=True)
    # A copy: the scores may be the model's own, or kept for the output.
    scores = scores.clone()
    scores[certain] = torch.full_like(scores[certain], -torch.inf).scatter(1, best, 0.0)
    return scores


def _walk_on_device(tree: DraftTree, scores: Tensor, state: GenerationState) -> Verdict:
    """The verdict by `verify_tree`, in one transfer."""
    uniforms = None
    if state.drawing:
        scores = _decided(scores, rows_of(tree), state)
        uniforms = torch.rand(len(scores), device=scores.device)
    most = max(len(tree.nodes(row)) for row in range(tree.num_rows))
    found = verify_tree(scores, *tree.on(scores.device), most, uniforms)
    columns = (found.num_accepted[:, None], found.bonus[:, None], found.accepted)
    accepted: list[list[int]] = []
    bonus: list[int | None] = []
    for row, (count, last, *path) in enumerate(fetch(torch.cat(columns, dim=1))):
        drafted = [tree.tokens[node] for node in path[:count]]
        # What lies after the end of a sequence is cut off by the stop rule, here as in `verify`.
        end = next((i for i, token in enumerate(drafted) if state.stop.ends_sequence(token)), None)
        accepted.append(path[:count] if end is None else path[: end + 1])
        bonus.append(drafted[end] if end is not None else last if last >= 0 else None)
        if last < 0 and tree.nodes(row):
            state.fail(row, _undefined(row))
            # As in `verify`.
            bonus[-1] = tree.tokens[tree.row_start[row]]
    return Verdict(tree, accepted, bonus)


class ResidualRejection(Verifier):
    """Leviathan's rule on chains, its extension to siblings on trees; see the module."""

    def _begin(self, tree: DraftTree, walk: Walk) -> None:
        if self._at_once(walk.raw, walk.state):
            probs = walk.look_at_all(tree).softmax(dim=-1, dtype=torch.float32)
            walk.choice = fetch(self._judge(tree, range(tree.num_nodes), probs))

    def _step(
        self, tree: DraftTree, walk: Walk, here: dict[int, int], paths: dict[int, list[int]]
    ) -> dict[int, tuple[int, int | None]]:
        if walk.choice is not None:
            return walk.follow(tree, here)
        probs = walk.visit(here, paths).softmax(dim=-1)
        return carried(tree, here, self._judge(tree, list(here.values()), probs).tolist())

    @staticmethod
    def _judge(tree: DraftTree, nodes: Sequence[int], target: Tensor) -> Tensor:
        """(M,) int64: the token that follows each of M nodes, that of an accepted child or a draw.

        The rule at (M, V) float32 `target` distributions, without waiting for the device.
        """
        siblings = [[tree.tokens[child] for child in tree.proposals(node)] for node in nodes]
        most = max(map(len, siblings))
        padded = [[*tokens, *[-1] * (most - len(tokens))] for tokens in siblings]
        table, places = send(
            [torch.tensor(part, dtype=torch.long) for part in (padded, nodes)], target.device
        )
        chosen = torch.full_like(places, -1)
        if most:
            assert tree.draft_probs is not None, "sampled drafts carry their distributions"
            draft = tree.draft_probs.to(target.device)[places]
        for tokens in table.unbind(dim=1):
            undecided = (chosen < 0) & (tokens >= 0)
            token = tokens.clamp(min=0)[:, None]
            uniforms = torch.rand(token.shape, device=target.device)
            fits = (uniforms * draft.gather(1, token) < target.gather(1, token))[:, 0]
            chosen = torch.where(undecided & fits, tokens, chosen)
            rejected = (undecided & ~fits)[:, None]
            residual = (target - draft).clamp_(min=0)
            # An empty residual means p = q up to rounding: a rejection there has no probability.
            target = torch.where(rejected, _normalised(residual, target), target)
            others = draft.scatter(1, token, 0.0)
            draft = torch.where(rejected, _normalised(others, others), draft)
        return torch.where(chosen < 0, draw_or_none(target), chosen)


def carried(
    tree: DraftTree, here: dict[int, int], tokens: Sequence[int]
) -> dict[int, tuple[int, int | None]]:
    """Per row the token that follows its current node, and the child that carries it if any."""
    pairs = zip(here.items(), tokens, strict=True)
    return {row: (token, tree.child(node, token)) for (row, node), token in pairs}


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Lines divided by their sums; those of `otherwise` where there is nothing to divide."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
