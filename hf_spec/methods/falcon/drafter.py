"""Falcon: a small head on the target's features drafts k tokens a pass, and whole trees of them.

The head reads the target's last features and the tokens that followed them; its newest k outputs
give a list of tokens for each of the k depths to come. A fixed tree of ranks says which entries of
the lists are sent, and which paths are drafted on in another pass, k depths at a time (Gao et al.
2024, arXiv 2412.12639). The head's keys and values of committed tokens stay; those of a draft rest
on predicted features, so they are dropped and the true ones are fed in the next round.

The draft depends on committed tokens and features alone, so it is judged by node draw.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.backend.device.transfer import fetch_all, send
from hf_spec.drafting.config import AUTO, PolicyConfig
from hf_spec.drafting.cost_model.acceptance_stats import NODES_PER_LEVEL
from hf_spec.drafting.cost_model.cost_model_drafter import measured, resolve, selects_nodes_by_cost
from hf_spec.drafting.length_policy import MEASURED, DraftedToken, LengthPolicy, make_policy
from hf_spec.drafting.rank_tree import RankTree, checked_tree
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict, likeliest
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.falcon.head import METHOD, FalconHead
from hf_spec.methods.falcon.loading import resolve_falcon_head
from hf_spec.methods.falcon.passes import DraftPass, DraftPlan, draft_plan
from hf_spec.methods.falcon.tree_choice import choose_tree, max_sent
from hf_spec.methods.feature_pairs.rows import PairRows, State
from hf_spec.methods.feature_pairs.runner import HeadRunner, check_packed
from hf_spec.methods.registry import register

COUNTERS = ("draft_nodes", "rounds")


def _make(config: FalconConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    check_packed(target)
    head = resolve_falcon_head(assistant, target)
    weighs = selects_nodes_by_cost(config, target)
    config = resolve(config, target)
    tree = choose_tree(config.tree, config.max_draft_tokens, head)
    if config.max_draft_tokens is None and config.length_policy != "disco":
        config = replace(config, max_draft_tokens=tree.height)
    policy = make_policy(config, target)
    given = config.max_nodes if isinstance(config.max_nodes, int) else None
    most = max_sent(config.tree, given, head)
    if config.length_policy == MEASURED or weighs:
        drafter = FalconDrafter(head, tree, policy, config.min_draft_tokens)
        config = replace(config, max_nodes=given or len(tree))
        return measured(drafter, policy, target, config, NODES_PER_LEVEL)
    return FalconDrafter(head, tree, policy, config.min_draft_tokens, most)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there.
    whole = FalconConfig(length_policy="static", max_nodes=sys.maxsize, batching=batching)
    return _make(whole, target, assistant)


@register("falcon", _make, _make_for_auto)
@dataclass(frozen=True)
class FalconConfig(PolicyConfig):
    """Options of a Falcon head's drafts; the length policy is asked between passes.

    Attributes:
        max_draft_tokens: depth at which the tree is cut; None leaves it whole.
        tree: "auto", the adapter's own tree or, without one, a chain of two passes with a few
            siblings; "chain"; a published one for k = 2, "falcon-vicuna" or "falcon-llama"; or a
            list of rank paths, see `hf_spec.drafting.rank_tree`.
        max_nodes: most nodes of a drafted tree that are sent to the target, the likeliest paths
            first, chosen again in every round (compare Li et al. 2024, arXiv 2406.16858, section
            4.2); "auto", of the adapter's own tree as many as are worth their time. None is what
            that was calibrated with; of other trees either is all nodes.
    """

    adapter_methods = (METHOD,)
    sizes = ("tree", "max_draft_tokens", "max_nodes")

    # Trees and adapters have sizes of their own.
    usual = MappingProxyType({})
    longest = MappingProxyType({})

    tree: Any = "auto"
    max_nodes: int | str | None = AUTO

    @property
    def selects_nodes_by_cost(self) -> bool:
        """Not of trees that are given node by node."""
        return super().selects_nodes_by_cost and self.tree == "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_draft_tokens", "max_nodes"):
            self.check(name, 1)
        object.__setattr__(self, "tree", checked_tree(self.tree, METHOD, ("auto", "chain")))


@dataclass
class _Drawn:
    """What one pass gave to A rows, and per row the same as lists, once fetched.

    That is (A, entries) tokens, their probabilities and maybe (A, lists) scores of the length
    policy.
    """

    rows: list[int]
    tensors: list[Tensor]
    host: dict[int, tuple[list[Any], ...]] = field(default_factory=dict)


class FalconDrafter(Drafter):
    """Drafts a fixed rank tree with a Falcon head in evaluation mode.

    The policy, by which a row never stops by default, is asked between passes, once there are
    `min_draft_tokens`. Of a row at most `max_nodes` are sent, the likeliest paths; None for all.

    Attributes:
        counters: "draft_nodes", sent to the target or not; "rounds", one per row and draft.
    """

    # From `start` on.
    _runner: HeadRunner
    _pairs: PairRows
    _placed: list[list[Tensor]]

    assisted_refusal_reason = (
        "a Falcon head needs the target's features, which assisted decoding does not hand on; use "
        "spec_strategy='falcon'"
    )

    def __init__(
        self,
        head: FalconHead,
        tree: RankTree,
        policy: LengthPolicy | None = None,
        min_draft_tokens: int = 1,
        max_nodes: int | None = None,
    ):
        self.head = head
        self.hidden_layers = tuple(dict.fromkeys(head.hidden_layers))
        self.tree = tree
        self.plan: DraftPlan = draft_plan(tree, head.shape.block_size)
        self.policy = policy or LengthPolicy(tree.height)
        self.max_depth = min(tree.height, self.policy.max_draft_tokens)
        self.min_draft_tokens = min_draft_tokens
        self.max_nodes = max_nodes
        # A policy that only sets limits need not be asked, which spares the host a wait a pass.
        self._asks = type(self.policy).goes_on is not LengthPolicy.goes_on
        self.counters: dict[str, int] = {}

    def num_forwards(self, depth: int) -> int:
        """A pass for every block of depths."""
        return -(-depth // self.head.shape.block_size)

    @property
    def timing_key(self) -> Hashable:
        """The head."""
        return id(self.head)

    def start(self, state: GenerationState) -> None:
        """Rows without pairs."""
        self._runner = HeadRunner(self.head, state.num_rows, state.expected_length)
        device = self.head.attention.device
        self._pairs = PairRows(state.num_rows, self.head.hidden_size, device)
        # The same in every round.
        self._placed = [send([p.parents, p.fed, p.lines], device) for p in self.plan.passes]
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.policy.start(state.num_rows)

    def restart(self, row: int) -> None:
        """One row without pairs, and a policy that knows nothing of it."""
        self._pairs.restart(row)
        self.policy.restart(row)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, in one pass per k depths over all rows."""
        size = self.head.shape.block_size
        depths = {}
        for row, limit in limits.items():
            self._pairs.roots[row] = len(state.tokens[row]) - 1
            most = min(self.plan.height, limit, self.policy.limit(row))
            # Before there are k pairs the newest block is not whole.
            depths[row] = most if self._pairs.rows[row].num_pairs >= size else 0
        drawn = self._run(state, depths)
        drafts = {}
        probs: list[float] = []
        for row, depth in depths.items():
            count = self.plan.within[max(depth, 0)]
            mine = [one.host[row] for one in drawn if row in one.host]
            tokens = [token for level in mine for token in level[0]]
            likely = [chance for level in mine for chance in level[1]]
            chosen = self.plan.entries[:count]
            ids = [state.tokens[row][-1], *(tokens[entry] for entry in chosen)]
            chances = [1.0, *(likely[entry] for entry in chosen)]
            nodes, parents = likeliest(self.plan.parents[: count + 1], chances, self.max_nodes)
            drafts[row] = [ids[node] for node in nodes], parents
            probs += [chances[node] for node in nodes]
            self.counters["rounds"] += 1
            self.counters["draft_nodes"] += count
        return DraftTree.from_drafts(drafts, state.num_rows, node_probs=probs)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the features of the root and of what was accepted; tell the policy."""
        self._pairs.learn(verdict, output, self.head)
        for row, accepted in enumerate(verdict.accepted):
            if verdict.tree.nodes(row):
                self.policy.observe(row, verdict.tree.height(row), len(accepted))

    def _run(self, state: GenerationState, limits: dict[int, int]) -> list[_Drawn]:
        """All passes; lowers the limits of rows whose policy says stop."""
        size = self.head.shape.block_size
        rows = [row for row, limit in limits.items() if limit > 0]
        drawn: list[_Drawn] = []
        reach = {row: [1.0] for row in rows}
        if not rows:
            return drawn
        outputs, carried = self._runner.feed([self._pairs.rows[row] for row in rows], state.tokens)
        outputs = outputs[:, None]
        for index, step in enumerate(self.plan.passes):
            if index:
                kept = [i for i, row in enumerate(rows) if limits[row] > index * size]
                if not kept:
                    break
                outputs, carried = self._deepen(index, rows, kept, outputs, carried, drawn[-1])
                rows = [rows[i] for i in kept]
            drawn.append(self._read(state, step, index, rows, outputs))
            if self._asks and index + 1 < len(self.plan.passes):
                self._ask(state, index, drawn[-1], limits, reach)
        _fetch(drawn)
        return drawn

    def _deepen(
        self,
        index: int,
        rows: Sequence[int],
        kept: Sequence[int],
        outputs: Tensor,
        carried: State | None,
        before: _Drawn,
    ) -> tuple[Tensor, State | None]:
        """Run a pass on the outputs (A, n, k, H) of the one before, for the rows at `kept`."""
        parents, fed, _ = self._placed[index]
        chosen: Tensor | slice = slice(None)
        if len(kept) < len(rows):
            (chosen,) = send([torch.tensor(kept)[:, None]], outputs.device)
        tokens = before.tensors[0][chosen, fed].view(len(kept), len(parents), -1)
        features = outputs[chosen, parents]
        if carried is not None:
            states = [part.view(2, *outputs.shape[:2], -1) for part in carried]
            hidden, cell = (part[:, chosen, parents].flatten(1, 2) for part in states)
            carried = hidden, cell
        pairs = [self._pairs.rows[rows[i]] for i in kept]
        return self._runner.grow(pairs, self.plan.passes[index].blocks, tokens, features, carried)

    def _read(
        self, state: GenerationState, step: DraftPass, index: int, rows: list[int], outputs: Tensor
    ) -> _Drawn:
        """The lists of a pass, from its outputs (A, n, k, H)."""
        lines = outputs.flatten(1, 2)
        if len(step.lines) < lines.shape[1]:
            lines = lines[:, self._placed[index][2]]
        tokens, likely, probs = self._runner.lists(lines.flatten(0, 1), step.num_ranks)
        found = [tokens, likely]
        if self._asks:
            size = self.head.shape.block_size
            depths = [index * size + line % size for line in step.lines.tolist()]
            positions = [state.generated[row] + depth for row in rows for depth in depths]
            scores = self.policy.score(probs, positions)
            found += [scores] if scores is not None else []
        return _Drawn(rows, [tensor.view(len(rows), -1) for tensor in found])

    def _ask(
        self,
        state: GenerationState,
        index: int,
        drawn: _Drawn,
        limits: dict[int, int],
        reach: dict[int, list[float]],
    ) -> None:
        """Ask the policy about the likeliest path that the next pass would go on from."""
        _fetch([drawn])
        this, following = self.plan.passes[index : index + 2]
        parents = following.parents.tolist()
        feeding = following.fed.view(len(parents), -1).tolist()
        depth = (index + 1) * self.head.shape.block_size
        newest = []
        for row in drawn.rows:
            tokens, likely, *scores = drawn.host[row]
            reach[row] = [
                reach[row][parent] * math.prod(likely[entry] for entry in fed)
                for parent, fed in zip(parents, feeding, strict=True)
            ]
            best = max(range(len(reach[row])), key=reach[row].__getitem__)
            last = feeding[best][-1]
            newest.append(
                DraftedToken(
                    row,
                    tokens[last],
                    state.generated[row] + depth - 1,
                    likely[last],
                    scores[0][last // this.num_ranks] if scores else 0.0,
                    min(1.0, sum(reach[row])),
                )
            )
        if depth < self.min_draft_tokens:
            return
        asked = [token for token in newest if limits[token.row] > depth]
        for token, goes_on in zip(asked, self.policy.goes_on(asked), strict=True):
            if not goes_on:
                limits[token.row] = depth


def _fetch(drawn: Sequence[_Drawn]) -> None:
    """Bring to the host what is not there yet, in one transfer."""
    if missing := [one for one in drawn if not one.host]:
        lists = iter(fetch_all([tensor for one in missing for tensor in one.tensors]))
        for one in missing:
            parts = [next(lists) for _ in one.tensors]
            one.host = dict(zip(one.rows, zip(*parts, strict=True), strict=True))
