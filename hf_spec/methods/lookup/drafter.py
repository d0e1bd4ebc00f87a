"""Drafts copied from the text itself: earlier occurrences of the last few tokens (LLMA / PLD).

The continuation of a repeated n-gram is often repeated too. The index covers the prompt and the
output and grows with it, or the prompt alone; several occurrences become one tree, the longest and
most recent first.
Sources: Yang et al. 2023, arXiv 2304.04487 (LLMA: match 2, copy 7); Saxena 2023 (prompt lookup).

With a store, drafts are copied from earlier answers, too (`hf_spec.methods.lookup.answer_store`).
Which of the two is better is learned in the generation where lengths are measured; otherwise it is
the one that is expected to bring more tokens, by the counts of what followed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.cost_model.acceptance_stats import DraftSource
from hf_spec.drafting.cost_model.cost_model_drafter import (
    AdaptiveLengthDrafter,
    Bounds,
    can_measure,
)
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.lookup.answer_store import BETWEEN, LONGEST_MATCH, LookupStore, suggest
from hf_spec.methods.lookup.answers_drafter import AnswersDrafter, KeepsAnswers
from hf_spec.methods.registry import register

# Drafts where one of the two is given.
COPY_LENGTH, MAX_NODES = 7, 15
# The longest draft where neither is.
LONGEST = 16
# Lengths of repeated runs, with the shares of the first and of the further tokens after them that
# are expected to be accepted. Measured on SmolLM2-135M-Instruct, 60 prompts of six tasks; a start,
# which a generation corrects.
RUNS = {range(1, 2): (0.2, 0.5), range(2, 3): (0.5, 0.75), range(3, 65): (0.8, 0.9)}
# Of earlier answers, which come with probabilities of their own: no reason to ask for less.
SURE = (0.9, 0.9)


def _make(config: LookupConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    if not isinstance(assistant, (LookupStore, type(None))):
        raise AssistantError(
            f"spec_strategy='lookup' takes no assistant, got {type(assistant).__name__}; drop "
            "assistant=, pass a hf_spec.LookupStore, or choose 'draft' or 'tree'"
        )
    if config.prompt_only and assistant is not None:
        raise OptionError(
            "LookupConfig(prompt_only=True) copies from no LookupStore; drop assistant=, or leave "
            "prompt_only out"
        )
    store = find_store(config.across_answers, target, assistant)
    if config.leaves_sizes_open and can_measure(target):
        sources = lookup_sources(config, LONGEST, store)
        return AdaptiveLengthDrafter(sources, target, config.batching, Bounds(LONGEST, 2 * LONGEST))
    return LookupDrafter(config) if store is None else BetterLookupDrafter(config, store)


def find_store(
    across_answers: bool, target: PreTrainedModel, given: LookupStore | None
) -> LookupStore | None:
    """The given store; the model's own where there is none and one is asked for; None otherwise.

    A store with answers in another vocabulary is refused (`OptionError`).
    """
    size = num_embeddings(target)
    if given is None and across_answers:
        given = cached_per_model(target, ("answers", size), LookupStore)
    if given is not None:
        given.serve(size)
    return given


@register("lookup", _make)
@dataclass(frozen=True)
class LookupConfig(StrategyConfig):
    """Options of the lookup drafter.

    Where neither `copy_length` nor `max_draft_tokens` is given, as many tokens are sent as are
    worth their time (`hf_spec.drafting.cost_model.cost_model_drafter`); otherwise, as many as there
    are.

    Attributes:
        match_length: longest n-gram that is looked up.
        min_match_length: shortest one, tried when the longer ones have no match.
        copy_length: how many tokens are copied from after a match; 7 where only `max_draft_tokens`
            is given.
        max_matches: how many occurrences may become branches of the tree.
        max_draft_tokens: most nodes of the tree, root excluded; 15 where only `copy_length` is
            given.
        prompt_only: copy from the prompt alone, as LLMA does, and not from the output so far.
        across_answers: copy from the answers of earlier calls, too, of which each model keeps the
            newest 65,536 tokens. With `assistant=hf_spec.LookupStore(...)` it is that store.
    """

    sizes = ("copy_length", "max_draft_tokens")

    match_length: int = 8
    min_match_length: int = 1
    copy_length: int | None = None
    max_matches: int = 2
    max_draft_tokens: int | None = None
    across_answers: bool = False
    prompt_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_flags("across_answers", "prompt_only")
        if self.prompt_only and self.across_answers:
            raise OptionError(
                "LookupConfig(prompt_only=True, across_answers=True): answers are no prompt; leave "
                "one of the two out"
            )
        # An index is kept per length, and a branch per match.
        for name in ("match_length", "min_match_length", "max_matches"):
            self.check(name, 1, 64)
        for name in ("copy_length", "max_draft_tokens"):
            self.check(name, 1)
        if self.min_match_length > self.match_length:
            raise OptionError(
                f"LookupConfig(min_match_length={self.min_match_length}) is larger than "
                f"match_length={self.match_length}"
            )


class LookupDrafter(Drafter):
    """Proposes what followed earlier occurrences of the last tokens."""

    def __init__(self, config: LookupConfig):
        self.config = config
        self._copy_length = config.copy_length or COPY_LENGTH
        self._max_nodes = config.max_draft_tokens or MAX_NODES
        self._indexes: list[_NgramIndex] = []

    def num_forwards(self, depth: int) -> int:
        """None."""
        return 0

    def start(self, state: GenerationState) -> None:
        """An empty index per row."""
        self._indexes = [self._new_index() for _ in state.tokens]

    def restart(self, row: int) -> None:
        """An empty index for one row."""
        self._indexes[row] = self._new_index()

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One trie of continuations per unfinished row."""
        drafts = {}
        for row, limit in limits.items():
            sequence = text = state.tokens[row]
            if self.config.prompt_only:
                text = sequence[: len(sequence) - state.generated[row]]
            self._indexes[row].extend(text)
            drafts[row] = self._propose(row, sequence, text, limit)
        return DraftTree.from_drafts(drafts, state.num_rows)

    def _new_index(self) -> _NgramIndex:
        return _NgramIndex(range(self.config.min_match_length, self.config.match_length + 1))

    def _propose(
        self, row: int, sequence: list[int], text: list[int], limit: int
    ) -> tuple[list[int], list[int]]:
        """Tokens and parents of one row's trie, copied from the `text` that is indexed."""
        tokens, parents = [sequence[-1]], [-1]
        children: dict[tuple[int, int], int] = {}
        copied = min(self._copy_length, limit)
        branches = 0
        # Occurrences that add nothing are passed over, but not thousands of them.
        looked_at = islice(self._indexes[row].matches(sequence), 8 * self.config.max_matches)
        for end in looked_at:
            if branches == self.config.max_matches:
                break
            size, node = len(tokens), 0
            for token in text[end : end + copied]:
                below = children.get((node, token))
                if below is None:
                    if len(tokens) > self._max_nodes:
                        return tokens, parents
                    below = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = below
            branches += len(tokens) > size
        return tokens, parents


class BetterLookupDrafter(KeepsAnswers, LookupDrafter):
    """Copies from earlier answers where these are expected to bring more than the text itself."""

    def __init__(self, config: LookupConfig, store: LookupStore):
        super().__init__(config)
        self.store = store

    def _propose(
        self, row: int, sequence: list[int], text: list[int], limit: int
    ) -> tuple[list[int], list[int]]:
        last = sequence[-LONGEST_MATCH:]
        bounds = self._max_nodes, min(self._copy_length, limit), self.config.min_match_length
        own = suggest(np.asarray([*sequence, BETWEEN], dtype=np.int32), last, *bounds)
        earlier = suggest(self.store.text, last, *bounds)
        if earlier.score > own.score:
            return [sequence[-1], *earlier.tokens], [-1, *earlier.parents]
        return super()._propose(row, sequence, text, limit)


def lookup_sources(
    config: LookupConfig, longest: int, store: LookupStore | None = None
) -> list[DraftSource]:
    """One source per length of repeated run: the longer it is, the longer it goes on.

    And one for earlier answers, if there is a store of them.
    """
    found = []
    for runs, shares in RUNS.items():
        least = max(runs.start, config.min_match_length)
        most = min(runs.stop - 1, config.match_length)
        if least <= most:
            part = replace(
                config,
                match_length=most,
                min_match_length=least,
                copy_length=longest,
                max_draft_tokens=2 * longest,
            )
            found.append(DraftSource("lookup", LookupDrafter(part), longest, shares))
    if store is not None:
        answers = AnswersDrafter(store, 2 * longest, longest, config.min_match_length)
        found.append(DraftSource("lookup", answers, longest, SURE))
    return found


class _NgramIndex:
    """Where each n-gram of a growing sequence ends, for the given lengths."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = lengths
        self._ends: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in lengths]
        self._indexed = 0

    def extend(self, sequence: Sequence[int]) -> None:
        """Index every n-gram that has a token after it."""
        for end in range(self._indexed + 1, len(sequence)):
            for length, ends in zip(self.lengths, self._ends, strict=True):
                if end >= length:
                    ends[tuple(sequence[end - length : end])].append(end)
        self._indexed = max(self._indexed, len(sequence) - 1)

    def matches(self, sequence: Sequence[int]) -> Iterator[int]:
        """Places after earlier occurrences of the sequence's end: longest first, then newest."""
        seen: set[int] = set()
        for length, ends in zip(reversed(self.lengths), reversed(self._ends), strict=True):
            for end in reversed(ends.get(tuple(sequence[-length:]), [])):
                if end not in seen:
                    seen.add(end)
                    yield end
