"""Infilling format of code (PSM and SPM) for training (section 3.1 of the paper).

A text is cut at two uniform character positions into prefix, middle and suffix. PSM orders them
prefix, suffix, middle; SPM puts the suffix first and lets the middle follow the prefix (Bavarian et
al. 2022, arXiv 2207.14255, in CodeLlama's form). SDSAT applies each with probability 25%. The
markers are the tokenizer's, or named tokens for models that were not trained for infilling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_spec.common.errors import OptionError

# Prefix, suffix and middle markers of known tokenizers.
MARKERS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)


@dataclass(frozen=True)
class Infilling:
    """Infilling format of one tokenizer, with the ids of its markers."""

    tokenizer: Any
    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, tokenizer: Any, markers: Sequence[str] = ()) -> Infilling:
        """Return the infilling format of a tokenizer, with `markers` or by default its own."""
        vocab = tokenizer.get_vocab()
        if unknown := [name for name in markers if name not in vocab]:
            raise OptionError(f"infilling_markers: {unknown[0]!r} is not in the tokenizer")
        for names in [tuple(markers)] if markers else MARKERS:
            if all(name in vocab for name in names):
                return cls(tokenizer, *(vocab[name] for name in names))
        raise OptionError(
            f"infilling: the tokenizer {type(tokenizer).__name__} has no infilling tokens such as "
            f"{MARKERS[0][0]}; set infilling=0, name three spare tokens as infilling_markers, or "
            "use a model that was trained for infilling"
        )

    def arrange(self, token_ids: list[int], generator: torch.Generator) -> list[int]:
        """Return a text as PSM or SPM, each with probability 1/2, with its end token last.

        The text is cut by characters, so tokens at the cuts may differ.
        """
        special = set(self.tokenizer.all_special_ids)
        # Decoded to text, a special token could be split by a cut.
        end = [token for token in token_ids[-1:] if token in special]
        body = token_ids[: len(token_ids) - len(end)]
        text = self.tokenizer.decode(body, clean_up_tokenization_spaces=False)
        cuts = torch.randint(0, len(text) + 1, (2,), generator=generator).sort().values.tolist()
        parts = (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :])
        before, between, after = (
            self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts
        )
        if int(torch.randint(0, 2, (), generator=generator)):
            return [self.prefix, *before, self.suffix, *after, self.middle, *between, *end]
        return [self.prefix, self.suffix, *after, self.middle, *before, *between, *end]

    @property
    def markers(self) -> frozenset[int]:
        """Ids of the markers, which adaptive tokens must not replace."""
        return frozenset({self.prefix, self.suffix, self.middle})
