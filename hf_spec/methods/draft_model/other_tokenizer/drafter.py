"""Drafts from a model that has another tokenizer than the target.

Either way the draft model reads the text so far in its own tokens
(`hf_spec.methods.draft_model.other_tokenizer.draft_text`); how its drafts become the target's
tokens is one of two:

=========  =====================================================================================
`shared`   It drafts tokens that both vocabularies have, by its own probabilities for these. They
           may be drawn at random, which residual rejection judges (TLI: Timor et al. 2025, arXiv
           2502.05202, algorithm 4).
`text`     It drafts what it likes. The text of every path is encoded with the target's tokenizer
           in the place where it would stand, and where that begins a token earlier, nothing is
           proposed. Never drawn at random, so node draw is exact for sampling, too (compare SLEM,
           algorithm 2 there).
=========  =====================================================================================

Text that a tokenizer does not give back as it was costs acceptance; the output is the target's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import EosTokenCriteria

from hf_spec.common.errors import OptionError
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict, likeliest
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.drafter import DraftModelConfig, DraftModelDrafter
from hf_spec.methods.draft_model.other_tokenizer.draft_text import DraftText
from hf_spec.methods.draft_model.other_tokenizer.text_tokens import (
    BROKEN,
    common_length,
    context_start,
)
from hf_spec.methods.draft_model.other_tokenizer.token_map import TokenMap, TokenPair

# Share of the target's tokens that a draft model must have to draft nothing else. Of SmolLM2's,
# Gemma 3 has 94 %, and both ways bring the same; of Gemma's, SmolLM2 has 18 %.
ENOUGH = 0.5


def make_translated(
    config: DraftModelConfig, model: PreTrainedModel, policy: LengthPolicy, pair: TokenPair
) -> DraftModelDrafter:
    """The drafter of a model whose tokenizer differs from the target's."""
    how = config.translation
    if how is None:
        lossy = getattr(config, "lossy", False)
        how = "shared" if lossy or pair.coverage >= ENOUGH else "text"
    kind = SharedDrafter if how == "shared" else TextDrafter
    return kind(config, model, policy, pair)


class TranslatingDrafter(DraftModelDrafter):
    """Keeps the text of every row in the draft model's tokens, and its keys and values to it.

    These follow what is stored, token by token: where an encoded end changed they are dropped.
    """

    reads_own_tokens = False

    def __init__(
        self,
        config: DraftModelConfig,
        model: PreTrainedModel,
        policy: LengthPolicy,
        pair: TokenPair,
    ):
        super().__init__(config, model, policy, pair.target.size)
        self.pair = pair
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._longest = longest or sys.maxsize

    def start(self, state: GenerationState) -> None:
        """Begin the text of every row."""
        super().start(state)
        self._texts = [DraftText(self.pair) for _ in range(state.num_rows)]
        # Per row the draft model's tokens up to its root, and those that are stored, maybe more.
        self.ids: list[list[int]] = [[] for _ in range(state.num_rows)]
        self._ran: list[list[int]] = [[] for _ in range(state.num_rows)]

    def restart(self, row: int) -> None:
        """Begin another text."""
        super().restart(row)
        self._texts[row] = DraftText(self.pair)
        self._ran[row] = []

    def prefill(self, run: Callable[[ModelRunner], object]) -> None:
        """Of prompts that are more than text it reads the text."""

    def _follow(self, tokens: Sequence[Sequence[int]], limits: Mapping[int, int]) -> dict[int, int]:
        """Read what is new of the rows; their limits, 0 where the draft model cannot go on."""
        room = {}
        for row, limit in limits.items():
            ids = self._texts[row].read(tokens[row])
            stored = self._ran[row][: self._runner.rows.stored[row]]
            common = common_length(stored, ids[:-1])
            self._runner.shorten(row, common)
            self.ids[row] = ids
            room[row] = max(0, min(limit, self._longest - len(ids))) if ids else 0
        return room


class SharedRunner(ModelRunner):
    """Runs a draft model on trees of the target's tokens, for all that both vocabularies have.

    `texts` has per row its own tokens, of which the last one stands for the root.
    """

    texts: Sequence[Sequence[int]] = ()

    def __init__(self, model: PreTrainedModel, num_rows: int, batching: str, common: TokenMap):
        super().__init__(model, num_rows, batching=batching)
        self.common = common

    def forward(
        self,
        tree: DraftTree,
        sequences: Sequence[Sequence[int]],
        nodes: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """See `ModelRunner.forward`; logits are those of the target's tokens."""
        tokens = [self.common.to_draft(token) for token in tree.tokens]
        for row, (first, end) in enumerate(pairwise(tree.row_start)):
            if first < end:
                tokens[first] = self.texts[row][-1]
        ours = DraftTree(tokens, tree.parent, tree.depth, tree.row_start)
        output = super().forward(ours, self.texts, nodes)
        output.logits = self.common.spread(output.logits)
        return output


class SharedDrafter(TranslatingDrafter):
    """Drafts tokens that both vocabularies have, whatever the shape of the draft."""

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row."""
        room = self._follow(state.tokens, limits)
        self._runner.texts = self.ids  # type: ignore[attr-defined]
        return super().draft(state, room)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Note which tokens are stored."""
        super().observe(verdict, output)
        for row, path in enumerate(verdict.paths):
            if row in self._sent:
                tokens = [self._sent[row].tokens[node] for node in path]
                self._ran[row] = self.ids[row] + [self.pair.common.to_draft(t) for t in tokens]

    @property
    def _translates(self) -> bool:
        """Always: its tokens become the target's."""
        return True

    def _make_runner(self, num_rows: int) -> ModelRunner:
        return SharedRunner(self.model, num_rows, self.config.batching, self.pair.common)


@dataclass
class _Said:
    """What a path of the draft says: its text, the target's token that ends it, its probability."""

    text: str = ""
    end: int | None = None
    reach: float = 1.0


class TextDrafter(TranslatingDrafter):
    """Drafts in the draft model's own tokens and encodes the text of every path again."""

    def __init__(
        self,
        config: DraftModelConfig,
        model: PreTrainedModel,
        policy: LengthPolicy,
        pair: TokenPair,
    ):
        if getattr(config, "lossy", False):
            raise OptionError(
                "lossy=True goes by the draft model's probability of each token, and encoded "
                "text has none; use translation='shared'"
            )
        super().__init__(config, model, policy, pair)
        self.ends = {ours: theirs for theirs, ours in pair.special.items()}

    def start(self, state: GenerationState) -> None:
        """Begin with the draft model's own view of the sequences."""
        end = self.pair.draft.tokenizer.eos_token_id
        stop = StopRules([] if end is None else [EosTokenCriteria(end)], state.num_rows)
        nothing = torch.zeros(state.num_rows, 0, dtype=torch.long, device=state.device)
        # Processors know the target's tokens alone.
        self._own = GenerationState.create(nothing, nothing, stop)
        super().start(self._own)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, made of the paths of the draft model's own."""
        room = self._follow(state.tokens, limits)
        self._own.tokens = self.ids
        self._own.generated = state.generated
        able = {row: limit for row, limit in room.items() if self.ids[row]}
        self._tree = super().draft(self._own, able)
        drafts, probs = {}, []
        for row, limit in limits.items():
            deepest = max(self.max_depth, self._tree.height(row))
            paths = _Paths(state.tokens[row][-1], min(limit, deepest))
            if row in able:
                for tokens, chances in self._paths(row):
                    paths.add(tokens, chances)
            kept, parents = likeliest(paths.parents, paths.probs, self.shape.max_nodes)
            drafts[row] = [paths.tokens[node] for node in kept], parents
            probs += [paths.probs[node] for node in kept]
        return DraftTree.from_drafts(drafts, state.num_rows, node_probs=probs)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Find out how far the draft model's own tree was right."""
        assert self._generation is not None, "drafts are judged while active"
        accepted: list[list[int]] = [[] for _ in verdict.accepted]
        for row in self._sent:
            before, ids = self.ids[row], self._texts[row].read(self._generation.tokens[row])
            node = self._tree.row_start[row]
            for token in ids[len(before) :] if ids[: len(before)] == before else ():
                child = self._tree.child(node, token)
                if child is None:
                    break
                accepted[row].append(child)
                node = child
            self._ran[row] = before + [self._tree.tokens[node] for node in accepted[row]]
        super().observe(Verdict(self._tree, accepted, verdict.bonus), output)

    def _make_runner(self, num_rows: int) -> ModelRunner:
        runner = ModelRunner(self.model, num_rows, batching=self.config.batching)
        runner.rounded = True
        return runner

    def _paths(self, row: int) -> list[tuple[list[int], list[float]]]:
        """Per leaf of a row's tree the target's tokens and how probable it is to get so far."""
        tree, said = self._tree, self._said(row)
        above: dict[int, list[_Said]] = {}
        for node in tree.nodes(row)[1:]:
            above[node] = [*above.get(tree.parent[node], []), said[node]]
        leaves = [path for node, path in above.items() if not tree.children[node]]
        leaves.sort(key=lambda path: -path[-1].reach)
        texts = [path[-1].text.rstrip(BROKEN) for path in leaves]
        found = []
        for path, text, (tokens, ends) in zip(leaves, texts, self._encode(row, texts), strict=True):
            last = path[-1]
            reaches = [
                next((one.reach for one in path if len(one.text) >= end), last.reach)
                for end in ends
            ]
            if last.end is not None and text == last.text:
                found.append(([*tokens, last.end], [*reaches, last.reach]))
            else:
                found.append((tokens, reaches))
        return found

    def _said(self, row: int) -> dict[int, _Said]:
        """What the path to each node of a row says, until a token ends it."""
        tree, first = self._tree, self._tree.row_start[row]
        assert tree.node_probs is not None, "drafts of a model carry its probabilities"
        paths: dict[int, list[int]] = {first: []}
        for node in tree.nodes(row)[1:]:
            paths[node] = [*paths[tree.parent[node]], tree.tokens[node]]
        texts = self.pair.draft.go_on_all(self._texts[row].newest, list(paths.values()))
        said = {first: _Said()}
        for node, text in zip(tree.nodes(row)[1:], texts[1:], strict=True):
            before = said[tree.parent[node]]
            end = self.ends.get(tree.tokens[node]) if before.end is None else before.end
            reach = before.reach * tree.node_probs[node]
            said[node] = _Said(text if end is None else before.text, end, reach)
        return said

    def _encode(self, row: int, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """The target's tokens of texts that follow a row's, and where in the text each ends."""
        text = self._texts[row]
        start = context_start(text.text, len(text.text))
        border = len(text.text) - start
        found = []
        for pieces in self.pair.target.encode_all([text.text[start:] + one for one in texts]):
            new = [piece for piece in pieces if piece.end > border]
            if new and new[0].start < border:
                # A token that is there already would have gone on.
                new = []
            tokens = [piece.token for piece in new]
            known = len(text.unfinished)
            if tokens[:known] != text.unfinished:
                new = []
            found.append((tokens[known:] if new else [], [p.end - border for p in new[known:]]))
        return found


class _Paths:
    """Paths of the target's tokens as one tree; of each node how probable it is after its parent.

    None is deeper than `limit`.
    """

    def __init__(self, root: int, limit: int):
        self.tokens, self.parents, self.probs = [root], [-1], [1.0]
        self.limit = limit
        self._reach = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, tokens: Sequence[int], reaches: Sequence[float]) -> None:
        """Add a path, likelier ones before others."""
        node = 0
        for token, reach in list(zip(tokens, reaches, strict=True))[: self.limit]:
            below = self._children.setdefault((node, token), len(self.tokens))
            if below == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
                self._reach.append(min(reach, self._reach[node]))
                above = self._reach[node]
                self.probs.append(self._reach[below] / above if above else 0.0)
            node = below
