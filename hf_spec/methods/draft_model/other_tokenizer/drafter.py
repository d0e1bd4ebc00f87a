"""Drafters for a draft model with another tokenizer; for both see the package."""

from __future__ import annotations

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
from hf_spec.engine.forward.output import ALL_LOGITS, ForwardOutput, Readout
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.drafter import DraftConfig, DraftModelDrafter
from hf_spec.methods.draft_model.other_tokenizer.draft_text import DraftText
from hf_spec.methods.draft_model.other_tokenizer.tokenizers import (
    REPLACEMENT,
    TokenizerPair,
    TokenMap,
    common_length,
    context_start,
)

# Coverage of the target's vocabulary from which "shared" is the default. Gemma 3 covers 94% of
# SmolLM2's, where both ways are equally fast; SmolLM2 covers 18% of Gemma's.
MIN_COVERAGE = 0.5


def make_cross_tokenizer_drafter(
    config: DraftConfig, model: PreTrainedModel, policy: LengthPolicy, pair: TokenizerPair
) -> DraftModelDrafter:
    """Return the drafter for a draft model with another tokenizer, by `config.translation`."""
    lossy = getattr(config, "lossy", False)
    if lossy and config.translation == "text":
        raise OptionError(
            "lossy=True needs the draft model's probability of each target token, which "
            "translation='text' does not provide; use translation='shared'"
        )
    shared = config.translation == "shared"
    if config.translation is None:
        shared = lossy or pair.coverage >= MIN_COVERAGE
    return (SharedDrafter if shared else TextDrafter)(config, model, policy, pair)


class CrossTokenizerDrafter(DraftModelDrafter):
    """Base class: keeps the text of every row in the draft model's tokens.

    Where re-encoding changes tokens at the end, their keys and values are dropped.

    Attributes:
        ids: per row the draft model's tokens up to the root.
    """

    # The draft model does not read the drafted token ids as they are.
    supports_device_growth = False

    def __init__(
        self,
        config: DraftConfig,
        model: PreTrainedModel,
        policy: LengthPolicy,
        pair: TokenizerPair,
    ):
        super().__init__(config, model, policy)
        self.pair = pair

    def start(self, state: GenerationState) -> None:
        """Begin the text of every row."""
        super().start(state)
        self._texts = [DraftText(self.pair) for _ in range(state.num_rows)]
        self.ids: list[list[int]] = [[] for _ in range(state.num_rows)]
        # Per row the tokens of the KV cache, possibly followed by others.
        self._stored_ids: list[list[int]] = [[] for _ in range(state.num_rows)]

    def restart(self, row: int) -> None:
        """Begin the text of one row."""
        super().restart(row)
        self._texts[row] = DraftText(self.pair)
        self._stored_ids[row] = []

    def visit_runner(self, visit: Callable[[ModelRunner], object]) -> None:
        """Do nothing: the draft model reads only the text of a multimodal prompt."""

    def _read(self, tokens: Sequence[Sequence[int]], limits: Mapping[int, int]) -> dict[int, int]:
        """Read the new tokens of the rows; return `limits`, 0 for rows without text."""
        reduced = {}
        for row, limit in limits.items():
            ids = self._texts[row].read(tokens[row])
            stored = self._stored_ids[row][: self._runner.rows.stored[row]]
            self._runner.shorten(row, common_length(stored, ids[:-1]))
            self.ids[row] = ids
            reduced[row] = limit if ids else 0
        return reduced

    def _sequences(self, state: GenerationState) -> Sequence[Sequence[int]]:
        return self.ids


class SharedRunner(ModelRunner):
    """Runs a draft model on trees of target tokens that both vocabularies have."""

    # Per row the draft model's tokens; the last one replaces the root.
    texts: Sequence[Sequence[int]] = ()

    def __init__(self, model: PreTrainedModel, num_rows: int, batching: str, shared: TokenMap):
        super().__init__(model, num_rows, batching=batching)
        self.shared = shared

    def forward(
        self,
        tree: DraftTree,
        sequences: Sequence[Sequence[int]],
        nodes: Sequence[int] | None = None,
        readout: Readout = ALL_LOGITS,
    ) -> ForwardOutput:
        """Return logits over the target's tokens."""
        tokens = [self.shared.to_draft(token) for token in tree.tokens]
        for row, (first, end) in enumerate(pairwise(tree.row_start)):
            if first < end:
                tokens[first] = self.texts[row][-1]
        draft_tokens = DraftTree(tokens, tree.parent, tree.depth, tree.row_start)
        output = super().forward(draft_tokens, self.texts, nodes, readout)
        output.logits = self.shared.to_target_logits(output.logits)
        return output


class SharedDrafter(CrossTokenizerDrafter):
    """Drafts tokens that both vocabularies have (TLI)."""

    # The runner converts tokens and logits.
    _translates = True

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """See `LevelDrafter.draft`."""
        limits = self._read(state.tokens, limits)
        self._runner.texts = self.ids  # type: ignore[attr-defined]
        return super().draft(state, limits)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Also record the tokens of the KV cache."""
        super().observe(verdict, output)
        for row, path in enumerate(verdict.paths):
            if row in self._sent:
                tokens = [self._sent[row].tokens[node] for node in path]
                drafted = [self.pair.shared.to_draft(token) for token in tokens]
                self._stored_ids[row] = self.ids[row] + drafted

    def _make_runner(self, num_rows: int) -> ModelRunner:
        return SharedRunner(self.model, num_rows, self.config.batching, self.pair.shared)


@dataclass
class _PathText:
    """Text of a draft path before its special token, the target's id of that, and its reach."""

    text: str = ""
    end: int | None = None
    reach: float = 1.0


class TextDrafter(CrossTokenizerDrafter):
    """Drafts the draft model's own tokens and encodes the text of every path for the target."""

    def start(self, state: GenerationState) -> None:
        """Begin with a state of the sequences in the draft model's tokens."""
        eos = self.pair.draft.tokenizer.eos_token_id
        stop = StopRules([] if eos is None else [EosTokenCriteria(eos)], state.num_rows)
        empty = torch.zeros(state.num_rows, 0, dtype=torch.long, device=state.device)
        # Without logits processors, which work on the target's tokens.
        self._draft_state = GenerationState.create(empty, empty, stop)
        # Draft id -> target id.
        self._special_ids = {draft: target for target, draft in self.pair.special_ids.items()}
        super().start(self._draft_state)

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one tree per unfinished row, from the encoded paths of the draft model's tree."""
        reduced = self._read(state.tokens, limits)
        self._draft_state.tokens = self.ids
        self._draft_state.generated = state.generated
        with_text = {row: limit for row, limit in reduced.items() if self.ids[row]}
        self._tree = super().draft(self._draft_state, with_text)
        drafts, probs = {}, []
        for row, limit in limits.items():
            deepest = max(self.max_depth, self._tree.height(row))
            paths = self._target_paths(row) if row in with_text else []
            root, depth = state.tokens[row][-1], min(limit, deepest)
            tokens, all_parents, all_probs = _merged_paths(root, paths, depth)
            nodes, parents = likeliest(all_parents, all_probs, self.shape.max_nodes)
            drafts[row] = [tokens[node] for node in nodes], parents
            probs += [all_probs[node] for node in nodes]
        return DraftTree.from_drafts(drafts, state.num_rows, node_probs=probs)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Find the accepted path of the draft model's own tree, and update with it."""
        assert self._generation is not None, "drafts are verified while active"
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
            self._stored_ids[row] = before + [self._tree.tokens[node] for node in accepted[row]]
        super().observe(Verdict(self._tree, accepted, verdict.bonus), output)

    def _target_paths(self, row: int) -> list[tuple[list[int], list[float]]]:
        """Return the target's tokens and their reach per leaf of a row's tree, likeliest first."""
        tree, texts = self._tree, self._path_texts(row)
        paths: dict[int, list[_PathText]] = {}
        for node in tree.nodes(row)[1:]:
            paths[node] = [*paths.get(tree.parent[node], []), texts[node]]
        leaves = [path for node, path in paths.items() if not tree.children[node]]
        leaves.sort(key=lambda path: -path[-1].reach)
        whole = [path[-1].text.rstrip(REPLACEMENT) for path in leaves]
        encoded = []
        for path, text, (tokens, ends) in zip(leaves, whole, self._encode(row, whole), strict=True):
            last = path[-1]
            # The reach of the shortest prefix whose text contains the token.
            reaches = [next((p.reach for p in path if len(p.text) >= e), last.reach) for e in ends]
            end = [last.end] if last.end is not None and text == last.text else []
            encoded.append(([*tokens, *end], [*reaches, *[last.reach] * len(end)]))
        return encoded

    def _path_texts(self, row: int) -> dict[int, _PathText]:
        """Return the text of the path to each node of a row, up to a special token."""
        tree, root = self._tree, self._tree.row_start[row]
        assert tree.node_probs is not None, "drafts of a model have node probabilities"
        paths: dict[int, list[int]] = {root: []}
        for node in tree.nodes(row)[1:]:
            paths[node] = [*paths[tree.parent[node]], tree.tokens[node]]
        decoded = self.pair.draft.decode_all_after(self._texts[row].context, list(paths.values()))
        texts = {root: _PathText()}
        for node, text in zip(tree.nodes(row)[1:], decoded[1:], strict=True):
            before = texts[tree.parent[node]]
            end = self._special_ids.get(tree.tokens[node]) if before.end is None else before.end
            reach = before.reach * tree.node_probs[node]
            texts[node] = _PathText(text if end is None else before.text, end, reach)
        return texts

    def _encode(self, row: int, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return, per text after the row's text, the target's tokens and where each ends in it.

        Empty if the text would change tokens that are already committed.
        """
        before = self._texts[row]
        start = context_start(before.text, len(before.text))
        border = len(before.text) - start
        skipped = len(before.incomplete)
        encoded: list[tuple[list[int], list[int]]] = []
        for spans in self.pair.target.encode_all([before.text[start:] + text for text in texts]):
            new = [span for span in spans if span.end > border]
            tokens = [span.token for span in new]
            changes_token = bool(new) and new[0].start < border
            if changes_token or tokens[:skipped] != before.incomplete:
                encoded.append(([], []))
            else:
                encoded.append((tokens[skipped:], [span.end - border for span in new[skipped:]]))
        return encoded


def _merged_paths(
    root: int, paths: Sequence[tuple[Sequence[int], Sequence[float]]], limit: int
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and probabilities of a tree of paths, cut after `limit` levels.

    A path has tokens and the reach of each; the paths are in descending order of reach.
    """
    tokens, parents, probs, reach = [root], [-1], [1.0], [1.0]
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token, token_reach in list(zip(*path, strict=True))[:limit]:
            below = children.setdefault((node, token), len(tokens))
            if below == len(tokens):
                tokens.append(token)
                parents.append(node)
                reach.append(min(token_reach, reach[node]))
                probs.append(reach[below] / reach[node] if reach[node] else 0.0)
            node = below
    return tokens, parents, probs
