"""Two vocabularies: which tokens of one are the same text as which of the other.

Tokenizers write one text in different ways: a space before a word is "Ġ", "▁" or nothing, and it is
the inside of a word that is marked. So tokens are compared by what they are decoded to after a
letter. Parts of characters, which have no text, are compared by name. (The shared vocabulary is
that of TLI: Timor et al. 2025, arXiv 2502.05202, which compares names.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_spec.common.errors import AssistantError
from hf_spec.methods.draft_model.other_tokenizer.text_tokens import BROKEN, TextTokens


@dataclass(frozen=True, eq=False)
class TokenPair:
    """The target's tokenizer and the draft model's."""

    target: TextTokens
    draft: TextTokens

    @property
    def same(self) -> bool:
        """Whether both give the same id to the same token."""
        target, draft = self.target.tokenizer, self.draft.tokenizer
        return len(target) == len(draft) and target.get_vocab() == draft.get_vocab()

    @cached_property
    def special(self) -> dict[int, int]:
        """Target id -> draft id of special tokens of the same name, and of those that end."""
        named = {self.draft.tokenizer.convert_ids_to_tokens(t): t for t in self.draft.special}
        found = {}
        for token in sorted(self.target.special):
            name = self.target.tokenizer.convert_ids_to_tokens(token)
            if name in named:
                found[token] = named[name]
        ends = self.target.tokenizer.eos_token_id, self.draft.tokenizer.eos_token_id
        if None not in ends:
            found[ends[0]] = ends[1]
        sizes = self.target.size, self.draft.size
        return {a: b for a, b in found.items() if a < sizes[0] and b < sizes[1]}

    @property
    def coverage(self) -> float:
        """Share of the target's tokens that the draft model has, too."""
        return len(self._equal) / len(self.target.tokenizer)

    @cached_property
    def common(self) -> TokenMap:
        """The tokens that both have.

        Raises:
            AssistantError: if there are none.
        """
        if not self._equal:
            raise AssistantError(
                "the tokenizers of target and draft model have no token in common; use "
                "translation='text'"
            )
        return TokenMap({**self._equal, **self.special}, self.target.size)

    @cached_property
    def _equal(self) -> dict[int, int]:
        """Target id -> draft id of tokens of the same text."""
        draft, target = _by_text(self.draft), _by_text(self.target)
        return {token: draft[text] for text, token in target.items() if text in draft}


class TokenMap:
    """Target id -> draft id of the tokens that two vocabularies share; `size` is the target's."""

    def __init__(self, pairs: dict[int, int], size: int):
        self.pairs = pairs
        self.size = size
        self._ids = torch.tensor([list(pairs), list(pairs.values())])

    def to_draft(self, token: int) -> int:
        """The draft model's id of a token of the target; any where it has none."""
        return self.pairs.get(token, 0)

    def spread(self, logits: Tensor) -> Tensor:
        """(..., V) logits of the target's tokens from the draft model's, -inf where it has none."""
        target_ids, draft_ids = self._on(logits.device)
        spread = logits.new_full((*logits.shape[:-1], self.size), float("-inf"))
        spread[..., target_ids] = logits[..., draft_ids]
        return spread

    def _on(self, device: torch.device) -> Tensor:
        if self._ids.device != device:
            self._ids = self._ids.to(device)
        return self._ids


def _by_text(tokens: TextTokens) -> dict[str, int]:
    """Text of a token after a letter -> its id; names of parts of characters, marked, as well."""
    if tokens.letter is None:
        return {}
    names = tokens.tokenizer.convert_ids_to_tokens(range(min(len(tokens.tokenizer), tokens.size)))
    known = tokens.decode([tokens.letter])
    plain = [
        token
        for token, name in enumerate(names)
        if name is not None and token not in tokens.special and not _is_byte(name)
    ]
    texts = tokens.decode_all([[tokens.letter, token] for token in plain])
    found: dict[str, int] = {}
    for token, text in zip(plain, texts, strict=True):
        said = text[len(known) :] if text.startswith(known) else ""
        key = BROKEN + names[token] if BROKEN in said else said
        if key:
            # Of several that are written alike the first is the usual one.
            found.setdefault(key, token)
    for token, name in enumerate(names):
        if name is not None and _is_byte(name):
            found.setdefault(BROKEN + name, token)
    return found


def _is_byte(name: str) -> bool:
    """Whether a token is one that stands for a byte, as in SentencePiece: <0x0A>."""
    return len(name) == len("<0x0A>") and name.startswith("<0x") and name.endswith(">")
