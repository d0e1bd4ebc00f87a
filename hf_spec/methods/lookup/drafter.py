"""Config and drafter of `lookup`; for the method see `hf_spec.methods.lookup`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.cost_model.adaptive_length_drafter import AdaptiveLengthDrafter, can_measure
from hf_spec.drafting.cost_model.cost_model_drafter import Bounds
from hf_spec.drafting.cost_model.draft_source import DraftSource
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.lookup.answer_store import (
    LONGEST_MATCH,
    SEPARATOR,
    AnswerRecorder,
    AnswersDrafter,
    LookupStore,
    find_draft,
)
from hf_spec.methods.registry import register

# Defaults where only the other one is configured.
COPY_LENGTH, MAX_NODES = 7, 15
# Longest draft where neither is configured.
LONGEST = 16
# Kinds of drafts, by the length of the longest match: shortest length -> prior acceptance rates of
# the first and of further copied tokens. Measured on answers of SmolLM2-135M-Instruct and
# Qwen2.5-Coder-1.5B-Instruct to prompts of six tasks; a generation updates them.
MATCH_PRIORS = {1: (0.25, 0.65), 2: (0.5, 0.75), 3: (0.7, 0.8), 8: (0.95, 0.95)}


def _make(config: LookupConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    if not isinstance(assistant, LookupStore | None):
        raise AssistantError(
            f"spec_strategy='lookup' takes no assistant, got {type(assistant).__name__}; drop "
            "assistant=, pass a hf_spec.LookupStore, or use 'draft' or 'tree'"
        )
    if config.prompt_only and assistant is not None:
        raise OptionError(
            "LookupConfig(prompt_only=True) cannot copy from a LookupStore; drop assistant=, or "
            "leave prompt_only out"
        )
    store = find_store(config.across_answers, target, assistant)
    if config.leaves_sizes_open and can_measure(target):
        sources = lookup_sources(config, LONGEST, store)
        return AdaptiveLengthDrafter(sources, target, config.batching, Bounds(LONGEST, 2 * LONGEST))
    return LookupDrafter(config) if store is None else StoreLookupDrafter(config, store)


def find_store(
    across_answers: bool, target: PreTrainedModel, store: LookupStore | None
) -> LookupStore | None:
    """Return `store` or, with `across_answers`, the store that is cached on the target."""
    size = num_embeddings(target)
    if store is None and across_answers:
        store = cached_per_model(target, ("answers", size), LookupStore)
    if store is not None:
        store.serve(size)
    return store


@register("lookup", _make)
@dataclass(frozen=True)
class LookupConfig(StrategyConfig):
    """Options of `lookup`.

    With neither `copy_length` nor `max_draft_tokens`, the cost model chooses the length
    (`hf_spec.drafting.cost_model`).

    Attributes:
        match_length: longest n-gram to match.
        min_match_length: shortest n-gram, tried if longer ones have no match.
        copy_length: number of tokens copied after a match. Default with `max_draft_tokens`: 7.
        max_matches: most matches that become branches of the tree.
        max_draft_tokens: most nodes of the tree, root excluded. Default with `copy_length`: 15.
        prompt_only: copy only from the prompt, as LLMA does, not from the output.
        across_answers: also copy from the answers of earlier calls. Each model stores the last
            65,536 tokens of its answers; `assistant=hf_spec.LookupStore(...)` sets another store.
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
                "LookupConfig(prompt_only=True, across_answers=True): the options exclude each "
                "other; leave one out"
            )
        # There is an index per length and a branch per match.
        for name in ("match_length", "min_match_length", "max_matches"):
            self.check(name, 1, 64)
        for name in ("copy_length", "max_draft_tokens"):
            self.check(name, 1)
        if self.min_match_length > self.match_length:
            raise OptionError(
                f"LookupConfig(min_match_length={self.min_match_length}) must not be "
                f"larger than match_length={self.match_length}"
            )


class LookupDrafter(Drafter):
    """Drafts what followed earlier occurrences of the last tokens in the sequence."""

    def __init__(self, config: LookupConfig):
        self.config = config
        self._copy_length = config.copy_length or COPY_LENGTH
        self._max_nodes = config.max_draft_tokens or MAX_NODES

    def num_forwards(self, depth: int) -> int:
        """Return 0: there is no model."""
        return 0

    def start(self, state: GenerationState) -> None:
        """Begin with an empty index per row."""
        lengths = range(self.config.min_match_length, self.config.match_length + 1)
        self._indexes = [_NgramIndex(lengths) for _ in state.tokens]
        self._kinds = [0] * state.num_rows

    def restart(self, row: int) -> None:
        """Begin with an empty index for one row."""
        self._indexes[row] = _NgramIndex(self._indexes[row].lengths)

    def draft_kind(self, row: int) -> int:
        """Return the kind of the longest match in `MATCH_PRIORS`; 0 if there is none."""
        return self._kinds[row]

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return one tree of continuations per unfinished row."""
        drafts = {}
        for row, limit in limits.items():
            sequence = text = state.tokens[row]
            if self.config.prompt_only:
                text = sequence[: len(sequence) - state.generated[row]]
            self._indexes[row].extend(text)
            drafts[row] = self._propose(row, sequence, text, limit)
        return DraftTree.from_drafts(drafts, state.num_rows)

    def _propose(
        self, row: int, sequence: list[int], text: list[int], limit: int
    ) -> tuple[list[int], list[int]]:
        """Return tokens and parents of one row's tree, copied from the indexed `text`."""
        tokens, parents = [sequence[-1]], [-1]
        children: dict[tuple[int, int], int] = {}
        copied = min(self._copy_length, limit)
        branches = 0
        index = self._indexes[row]
        longest = index.longest_match(sequence)
        self._kinds[row] = max((kind for kind in MATCH_PRIORS if kind <= longest), default=0)
        # Matches that add no node are skipped, up to a limit.
        matches = islice(index.matches(sequence, longest), 8 * self.config.max_matches)
        for end in matches:
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


class StoreLookupDrafter(AnswerRecorder, LookupDrafter):
    """Drafts from earlier answers if their score is higher than that of the sequence itself."""

    def __init__(self, config: LookupConfig, store: LookupStore):
        super().__init__(config)
        self.store = store

    def _propose(
        self, row: int, sequence: list[int], text: list[int], limit: int
    ) -> tuple[list[int], list[int]]:
        last = sequence[-LONGEST_MATCH:]
        bounds = self._max_nodes, min(self._copy_length, limit), self.config.min_match_length
        current = find_draft(np.asarray([*sequence, SEPARATOR], dtype=np.int32), last, *bounds)
        earlier = find_draft(self.store.text, last, *bounds)
        if earlier.score > current.score:
            return [sequence[-1], *earlier.tokens], [-1, *earlier.parents]
        return super()._propose(row, sequence, text, limit)


def lookup_sources(
    config: LookupConfig, longest: int, store: LookupStore | None = None
) -> list[DraftSource]:
    """Return a source for the sequence itself, and one for `store`."""
    copies = replace(config, copy_length=longest, max_draft_tokens=2 * longest)
    sources = [DraftSource("lookup", LookupDrafter(copies), longest, MATCH_PRIORS)]
    if store is not None:
        answers = AnswersDrafter(store, 2 * longest, longest, config.min_match_length)
        sources.append(DraftSource("lookup", answers, longest))
    return sources


class _NgramIndex:
    """Index of the end positions of all n-grams of a growing sequence, for some lengths n."""

    def __init__(self, lengths: range):
        self.lengths = lengths
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._indexed = 0

    def extend(self, sequence: Sequence[int]) -> None:
        """Index every new n-gram that has a token after it."""
        for end in range(self._indexed + 1, len(sequence)):
            for length in self.lengths:
                if end >= length:
                    self._ends[tuple(sequence[end - length : end])].append(end)
        self._indexed = max(self._indexed, len(sequence) - 1)

    def longest_match(self, sequence: Sequence[int]) -> int:
        """Return the length of the longest n-gram at the end that occurred before; 0 if none."""
        found = (n for n in reversed(self.lengths) if tuple(sequence[-n:]) in self._ends)
        return next(found, 0)

    def matches(self, sequence: Sequence[int], longest: int) -> Iterator[int]:
        """Yield the positions after n-grams equal to the last one; longer and later ones first.

        `longest` is the result of `longest_match`.
        """
        seen: set[int] = set()
        for length in range(longest, self.lengths.start - 1, -1):
            for end in reversed(self._ends.get(tuple(sequence[-length:]), [])):
                if end not in seen:
                    seen.add(end)
                    yield end
