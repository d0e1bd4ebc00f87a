"""Drafts copied from the text itself: earlier occurrences of the last few tokens (LLMA / PLD).

The continuation of a repeated n-gram is often repeated too. The index covers the prompt and the
output and grows with it; several occurrences become one tree, the longest and most recent first.
Sources: Yang et al. 2023, arXiv 2304.04487 (LLMA: match 2, copy 7); Saxena 2023 (prompt lookup).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.state import GenerationState
from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.measured import SelfTimedDrafter, can_measure
from hf_spec.drafting.sources import Source
from hf_spec.errors import AssistantError, OptionError
from hf_spec.execution.tree import DraftTree
from hf_spec.strategies.registry import register

# Drafts where one of the two is given.
COPY_LENGTH, MAX_NODES = 7, 15
# The longest draft where neither is.
LONGEST = 16
# Lengths of repeated runs, with the shares of the first and of the further tokens after them that
# are expected to be accepted. Measured on SmolLM2-135M-Instruct, 60 prompts of six tasks; a start,
# which a generation corrects.
RUNS = {range(1, 2): (0.2, 0.5), range(2, 3): (0.5, 0.75), range(3, 65): (0.8, 0.9)}


def _make(config: LookupConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    if assistant is not None:
        raise AssistantError(
            f"spec_strategy='lookup' takes no assistant, got {type(assistant).__name__}; "
            "drop assistant=, or choose 'draft' or 'tree'"
        )
    if not (config.leaves_sizes_open and can_measure(target)):
        return LookupDrafter(config)
    sources = lookup_sources(config, LONGEST)
    return SelfTimedDrafter(sources, target, config.batching, LONGEST, 2 * LONGEST)


@register("lookup", _make)
@dataclass(frozen=True)
class LookupConfig(StrategyConfig):
    """Options of the lookup drafter.

    Where neither `copy_length` nor `max_draft_tokens` is given, as many tokens are sent as are
    worth their time (`hf_spec.drafting.measured`); otherwise, as many as there are.

    Attributes:
        match_length: longest n-gram that is looked up.
        min_match_length: shortest one, tried when the longer ones have no match.
        copy_length: how many tokens are copied from after a match; 7 where only `max_draft_tokens`
            is given.
        max_matches: how many occurrences may become branches of the tree.
        max_draft_tokens: most nodes of the tree, root excluded; 15 where only `copy_length` is
            given.
    """

    sizes = ("copy_length", "max_draft_tokens")

    match_length: int = 8
    min_match_length: int = 1
    copy_length: int | None = None
    max_matches: int = 2
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
            sequence = state.tokens[row]
            self._indexes[row].extend(sequence)
            drafts[row] = self._trie(row, sequence, limit)
        return DraftTree.from_drafts(drafts, state.num_rows)

    def _new_index(self) -> _NgramIndex:
        return _NgramIndex(range(self.config.min_match_length, self.config.match_length + 1))

    def _trie(self, row: int, sequence: list[int], limit: int) -> tuple[list[int], list[int]]:
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
            for token in sequence[end : end + copied]:
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


def lookup_sources(config: LookupConfig, longest: int) -> list[Source]:
    """One source per length of repeated run: the longer it is, the longer it goes on."""
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
            found.append(Source("lookup", LookupDrafter(part), longest, shares))
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
