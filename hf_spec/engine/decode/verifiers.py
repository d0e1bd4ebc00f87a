"""Verifiers: which draft tokens the target accepts, with the target's output unchanged.

Both walk each row's tree from its root. At a node, p is the target's distribution of the next
token, after all of the user's logits processors, evaluated with that node's own prefix.

===================  ============================================================================
`NodeDraw`           draw x ~ p (greedy: the argmax). If a child has the token x, go there;
                     otherwise emit x and stop. Exact for every draft that is independent of these
                     draws.
`ResidualRejection`  for children drawn from q without replacement: accept a child x if
                     u q(x) < p(x), u uniform; otherwise p <- norm(max(p - q, 0)), q <- norm(q
                     without x) and on to its sibling; if none is left, emit a draw from p.
                     (Leviathan et al. 2023, arXiv 2211.17192, Alg. 1; siblings as in Miao et al.
                     2024, arXiv 2305.09781, with sampling without replacement.)
===================  ============================================================================

On a CPU the walk visits one level at a time and computes nothing for nodes off the path. On a GPU
every level would synchronize, so the `verify_tree` kernel walks and the outcome is fetched once,
unless a processor reads prefixes or the output has scores or logits. It runs in the CUDA graph of
the target's step if the processors are temperature, top-k, top-p, and min-p in this order, and all
rows draw or none does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hf_spec_kernels import Filter, filter_scores, serves, verify_tree
from torch import Tensor
from transformers import LogitsProcessor

from hf_spec.backend.device import transfer
from hf_spec.backend.device.transfer import fetch, send
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.decode.sampling import argmaxes, draw_or_none
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import Readout


class Verifier(LogitsProcessor):
    """Verifies draft trees. As a logits processor it applies all of the user's processors."""

    def __init__(self, processors: Sequence[Any], num_rows: int):
        self.processors = NodeProcessors(processors, num_rows)
        # Logits of ended rows for the next `verify`, see `logits_on_padding`.
        self.padding_logits: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the (B, V) scores of (B, L) ids, as plain `generate()` does."""
        return self.processors(range(input_ids.shape[0]), list(input_ids), scores)

    @property
    def can_repeat(self) -> bool:
        """True if a tree may be verified again: no processor remembers its calls."""
        return not self.processors.reads_prefix

    def reads_best_only(self, state: GenerationState) -> bool:
        """Return True if the next `verify` reads the best logit of each node and no other."""
        return False

    def readout(self, tree: DraftTree, state: GenerationState) -> Readout:
        """Return what the next `verify` reads of the target's logits."""
        return Readout(self.reads_best_only(state))

    def verify(
        self, tree: DraftTree, logits: Tensor, state: GenerationState, result: Tensor | None = None
    ) -> Verdict:
        """Walk every unfinished row down its tree of N nodes, by the target's (N, V) logits.

        `result` is that of the readout, if it ran with the target's step.
        """
        walk = Walk(self.processors, logits, state, self.padding_logits)
        accepted: list[list[int]] = [[] for _ in range(tree.num_rows)]
        bonus: list[int | None] = [None] * tree.num_rows
        here = {row: tree.row_start[row] for row in state.unfinished}
        paths: dict[int, list[int]] = {row: [] for row in here}
        self._begin(tree, walk)
        reads_batch = self.processors.reads_batch
        runs_user_code = self.processors.runs_user_code
        # One level per iteration, all rows together; a row drops out at its bonus token.
        while here:
            for row, (token, node) in self._step(tree, walk, here, paths).items():
                if token < 0:
                    state.fail(row, _undefined_error(row))
                if row in state.errors:
                    # Not committed, but drafters read the verdict.
                    bonus[row] = tree.tokens[tree.row_start[row]]
                elif node is None:
                    bonus[row] = token
                else:
                    accepted[row].append(node)
                    paths[row].append(token)
                    ends = state.stop.ends_sequence(token)
                    if ends or (runs_user_code and state.ends_after(row, paths[row])):
                        # Plain generate() computes nothing after it; the stop rule removes this.
                        bonus[row] = token
            some_ended = any(bonus[row] is not None for row in here)
            if reads_batch and (some_ended or state.stop.has_batch_criteria):
                for row in here:
                    if bonus[row] is None:
                        accepted[row].pop()
                        bonus[row] = paths[row][-1]
            here = {row: accepted[row][-1] for row in here if bonus[row] is None}
        scores = walk.scores if state.keep_scores else None
        return Verdict(tree, accepted, bonus, scores, walk.logits if state.keep_logits else None)

    def _begin(self, tree: DraftTree, walk: Walk) -> None:
        """Precompute what is computed for all nodes together."""

    @abstractmethod
    def _step(
        self, tree: DraftTree, walk: Walk, here: dict[int, int], paths: dict[int, list[int]]
    ) -> dict[int, tuple[int, int | None]]:
        """Return per row of `here` the next token, and the child that has it, if any.

        `here` has the current node per row, `paths` the tokens from the root's child to it. The
        token is -1 where a row draws and its scores define no distribution.
        """


class Walk:
    """The target's scores during one verification; processors run on requested nodes only.

    Attributes:
        scores, logits: per row (V,) float32 of each visited node, where the state keeps them.
        choices: token after each of the N nodes, where all were verified together.
    """

    def __init__(
        self,
        processors: NodeProcessors,
        logits: Tensor,
        state: GenerationState,
        padding_logits: Mapping[int, Tensor] | None = None,
    ):
        self.processors = processors
        self._padding_logits = padding_logits or {}
        self.raw = logits
        self.state = state
        self.scores: list[list[Tensor]] = [[] for _ in state.tokens]
        self.logits: list[list[Tensor]] = [[] for _ in state.tokens]
        self.choices: list[int] | None = None

    def scores_of(
        self, rows: Sequence[int], nodes: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return (M, V) float32 processed scores of M nodes, `paths` from the root's child."""
        raw = self.raw[nodes].to(self.state.device, torch.float32, copy=True)
        prefixes = self.state.prefixes(rows, paths) if self.processors.reads_prefix else None
        return self.processors(rows, prefixes, raw)

    def scores_of_all(self, tree: DraftTree) -> Tensor:
        """Return (N, V) processed scores of all nodes; no processor may read prefixes."""
        if self.processors.is_identity:
            return self.raw
        raw = self.raw.to(self.state.device, torch.float32, copy=True)
        return self.processors(_node_rows(tree), None, raw)

    def visit(self, here: dict[int, int], paths: dict[int, list[int]]) -> Tensor:
        """Return (len(here), V) float32 processed scores, and store what the output needs."""
        rows, nodes = list(here), list(here.values())
        if self.state.keep_logits:
            raw = self.raw[nodes].to(self.state.device, torch.float32, copy=True)
            for row, logits in zip(rows, raw, strict=True):
                self.logits[row].append(logits)
        if self.processors.reads_batch:
            scores = self._scores_of_batch(rows, nodes, paths)
        else:
            scores = self.scores_of(rows, nodes, [paths[row] for row in rows])
        if self.state.keep_scores:
            for row, score in zip(rows, scores, strict=True):
                self.scores[row].append(score)
        return scores

    def _scores_of_batch(
        self, rows: list[int], nodes: list[int], paths: Mapping[int, Sequence[int]]
    ) -> Tensor:
        """Return `scores_of` unfinished rows, processed beside those that have ended."""
        raw = self.raw[nodes].to(self.state.device, torch.float32, copy=True)
        batch = raw.new_zeros(self.state.num_rows, raw.shape[1])
        batch[rows] = raw
        for row, logits in self._padding_logits.items():
            batch[row] = logits[len(paths[rows[0]])]
        prefixes = self.state.padded_prefixes({row: paths[row] for row in rows})
        scores = self.processors(range(self.state.num_rows), prefixes, batch)
        if self.state.keep_scores:
            self.state.note_padding_scores({row: [scores[row]] for row in self._padding_logits})
        return scores[rows]


class ExactVerifier(Verifier):
    """Verifier that walks whole trees by the `verify_tree` kernel on a GPU."""

    def readout(self, tree: DraftTree, state: GenerationState) -> Readout:
        """Return the walk on the device if all rows follow one rule."""
        if state.device.type not in transfer.ASYNCHRONOUS or self._by_level(state):
            return super().readout(tree, state)
        alike = len({state.draws[row] for row in state.unfinished}) == 1
        filters = self.processors.filters(_node_rows(tree)) if alike else None
        return Readout() if filters is None else _tree_walk(tree, state, filters)

    def verify(
        self, tree: DraftTree, logits: Tensor, state: GenerationState, result: Tensor | None = None
    ) -> Verdict:
        """Verify a tree, see `Verifier`."""
        if result is not None:
            return _fetched(tree, result, state)
        if self._by_level(state) or not serves(logits):
            return super().verify(tree, logits, state)
        scores = Walk(self.processors, logits, state).scores_of_all(tree)
        if state.drawing:
            scores = _mask_greedy_rows(scores, _node_rows(tree), state)
        walk = _tree_walk(tree, state)
        assert walk.compute is not None
        return _fetched(tree, walk.compute(scores, send(walk.tensors, scores.device)), state)

    def _by_level(self, state: GenerationState) -> bool:
        """Return True if each node's scores are computed when the walk reaches it."""
        return self.processors.reads_prefix or state.keep_scores or state.keep_logits


class NodeDraw(ExactVerifier):
    """One draw per node, see the module; greedy rows take the argmax.

    Rows that draw may be in a batch with greedy rows: drafts depend on neither.
    """

    def reads_best_only(self, state: GenerationState) -> bool:
        """Return True if all rows are greedy, without processors, scores and logits."""
        by_level = state.drawing or state.keep_scores or state.keep_logits
        return self.processors.is_identity and not by_level

    def _begin(self, tree: DraftTree, walk: Walk) -> None:
        if self.reads_best_only(walk.state):
            walk.choices = argmaxes(walk.raw)

    def _step(
        self, tree: DraftTree, walk: Walk, here: dict[int, int], paths: dict[int, list[int]]
    ) -> dict[int, tuple[int, int | None]]:
        if walk.choices is not None:
            return _follow(tree, here, [walk.choices[node] for node in here.values()])
        scores = walk.visit(here, paths)
        if walk.state.drawing:
            scores = _mask_greedy_rows(scores, list(here), walk.state)
            tokens = draw_or_none(scores.softmax(dim=-1)).tolist()
        else:
            tokens = argmaxes(scores)
        return _follow(tree, here, tokens)


class ResidualRejection(ExactVerifier):
    """Leviathan's rule on chains and its extension to siblings on trees; see the module."""

    def _step(
        self, tree: DraftTree, walk: Walk, here: dict[int, int], paths: dict[int, list[int]]
    ) -> dict[int, tuple[int, int | None]]:
        probs = walk.visit(here, paths).softmax(dim=-1)
        return _follow(tree, here, self._judge(tree, list(here.values()), probs).tolist())

    @staticmethod
    def _judge(tree: DraftTree, nodes: Sequence[int], target: Tensor) -> Tensor:
        """Return the token after each of M nodes, of an accepted child or drawn: (M,) int64.

        `target` has their (M, V) float32 distributions. Does not synchronize with the device.
        """
        siblings = [[tree.tokens[child] for child in tree.proposals(node)] for node in nodes]
        most = max(map(len, siblings))
        padded = [[*tokens, *[-1] * (most - len(tokens))] for tokens in siblings]
        table, indices = send(
            [torch.tensor(part, dtype=torch.long) for part in (padded, nodes)], target.device
        )
        chosen = torch.full_like(indices, -1)
        if most:
            assert tree.draft_probs is not None, "sampled drafts have distributions"
            draft = tree.draft_probs.to(target.device)[indices]
        for tokens in table.unbind(dim=1):
            undecided = (chosen < 0) & (tokens >= 0)
            token = tokens.clamp(min=0)[:, None]
            uniforms = torch.rand(token.shape, dtype=torch.float32, device=target.device)
            fits = (uniforms * draft.gather(1, token) < target.gather(1, token))[:, 0]
            chosen = torch.where(undecided & fits, tokens, chosen)
            rejected = (undecided & ~fits)[:, None]
            residual = (target - draft).clamp_(min=0)
            # An empty residual means p = q up to rounding: a rejection there has no probability.
            target = torch.where(rejected, _normalized(residual, target), target)
            others = draft.scatter(1, token, 0.0)
            draft = torch.where(rejected, _normalized(others, others), draft)
        return torch.where(chosen < 0, draw_or_none(target), chosen)


def _undefined_error(row: int) -> RuntimeError:
    return RuntimeError(
        f"row {row}: no token can be drawn, since the probability tensor contains inf or nan after "
        "the logits processors; check temperature and the other sampling settings"
    )


def _node_rows(tree: DraftTree) -> list[int]:
    """Return the row of every node."""
    return [row for row in range(tree.num_rows) for _ in tree.nodes(row)]


def _follow(
    tree: DraftTree, here: dict[int, int], tokens: Sequence[int]
) -> dict[int, tuple[int, int | None]]:
    """Return per row the token after its current node, and the child that has it, if any."""
    pairs = zip(here.items(), tokens, strict=True)
    return {row: (token, tree.child(node, token)) for (row, node), token in pairs}


def _mask_greedy_rows(scores: Tensor, rows: Sequence[int], state: GenerationState) -> Tensor:
    """Return (M, V) scores to draw from, in which greedy rows have only their best token."""
    greedy = [index for index, row in enumerate(rows) if not state.draws[row]]
    if not greedy:
        return scores
    best = scores[greedy].argmax(dim=-1, keepdim=True)
    # A copy: these may be the model's logits, or scores stored for the output.
    scores = scores.clone()
    scores[greedy] = torch.full_like(scores[greedy], -torch.inf).scatter(1, best, 0.0)
    return scores


@dataclass(frozen=True)
class _TreeWalk:
    """Filters and a walk of whole trees on the device; the flags name its inputs."""

    filters: bool
    draws: bool
    residual: bool

    def __call__(self, logits: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return the packed verdict, see `TreeVerdict`; all inputs may end with padding."""
        tokens, parent, row_start, *others = tensors
        count = min(len(logits), len(tokens))
        inputs = iter([tensor[:count] for tensor in others])
        scores = logits[:count]
        if self.filters:
            scores = filter_scores(scores, next(inputs))
        uniforms = next(inputs) if self.draws else None
        draft_probs = next(inputs) if self.residual else None
        tree = (tokens[:count], parent[:count], row_start, count)
        return verify_tree(scores, *tree, uniforms, draft_probs).packed


def _tree_walk(tree: DraftTree, state: GenerationState, filters: Sequence[Filter] = ()) -> Readout:
    """Return the walk of a tree; its inputs are on the host except the draft's probabilities."""
    lists = (tree.tokens, tree.parent, tree.row_start)
    tensors = [torch.tensor(values, dtype=torch.long) for values in lists]
    filtering = any(chosen != Filter() for chosen in filters)
    if filtering:
        tensors.append(torch.tensor(filters, dtype=torch.float32))
    draft_probs = tree.draft_probs if state.drawing else None
    residual = draft_probs is not None
    if state.drawing:
        # Drawn on the host, they are sent with the rest.
        tensors.append(torch.rand(tree.num_nodes, *[2] * residual, dtype=torch.float32))
    if draft_probs is not None:
        tensors.append(draft_probs)
    return Readout(compute=_TreeWalk(filtering, state.drawing, residual), tensors=tensors)


def _fetched(tree: DraftTree, packed: Tensor, state: GenerationState) -> Verdict:
    """Return the verdict that `_TreeWalk` packed on the device, in one transfer."""
    accepted: list[list[int]] = []
    bonus: list[int | None] = []
    for row, (count, last, *path) in enumerate(fetch(packed)[: tree.num_rows]):
        drafted = [tree.tokens[node] for node in path[:count]]
        # As in `Verifier.verify`, the walk stops at an end of sequence.
        end = next((i for i, token in enumerate(drafted) if state.stop.ends_sequence(token)), None)
        accepted.append(path[:count] if end is None else path[: end + 1])
        bonus.append(drafted[end] if end is not None else last if last >= 0 else None)
        if last < 0 and tree.nodes(row):
            state.fail(row, _undefined_error(row))
            bonus[-1] = tree.tokens[tree.row_start[row]]
    return Verdict(tree, accepted, bonus)


def _normalized(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return rows divided by their sums; rows of `otherwise` where the sum is 0."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
