"""Code cut into prefix, middle and suffix and put together for infilling (PSM and SPM).

A text is cut at two places drawn uniformly over its characters. PSM is the prefix, the suffix, then
the middle; SPM puts the suffix first and lets the middle follow the prefix (Bavarian et al. 2022,
arXiv 2207.14255, in CodeLlama's form; SDSAT trains on each with 25 %). The markers are the
tokenizer's own; for a model that was not trained for infilling, tokens that are named take their
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_spec.common.errors import OptionError

# Prefix, suffix and middle marker as tokenizers call them.
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
    """Cuts texts for one tokenizer, by the ids of its markers; `Infilling.of` finds these."""

    tokenizer: Any
    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, tokenizer: Any, markers: Sequence[str] = ()) -> Infilling:
        """The infilling format of a tokenizer, by default with markers that it has for that.

        Raises:
            OptionError: if it has none, or does not know those named.
        """
        known = tokenizer.get_vocab()
        if unknown := [name for name in markers if name not in known]:
            raise OptionError(f"infilling_markers: the tokenizer does not know {unknown[0]!r}")
        for names in [tuple(markers)] if markers else MARKERS:
            if all(name in known for name in names):
                return cls(tokenizer, *(known[name] for name in names))
        raise OptionError(
            f"infilling: the tokenizer {type(tokenizer).__name__} has no infilling tokens such as "
            f"{MARKERS[0][0]}; set infilling=0, name three spare tokens as infilling_markers, or "
            "take a model that was trained for infilling"
        )

    def arrange(self, token_ids: list[int], generator: torch.Generator) -> list[int]:
        """A text in one of both orders, each half of the time, with its end token last.

        It is cut as a text, so that tokens at the cuts may become others.
        """
        special = set(self.tokenizer.all_special_ids)
        # As a text, a special token could be cut through.
        end = [token for token in token_ids[-1:] if token in special]
        kept = token_ids[: len(token_ids) - len(end)]
        text = self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        cuts = torch.randint(0, len(text) + 1, (2,), generator=generator).sort().values.tolist()
        parts = (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :])
        before, between, after = (
            self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts
        )
        if int(torch.randint(0, 2, (), generator=generator)):
            return [self.prefix, *before, self.suffix, *after, self.middle, *between, *end]
        return [self.prefix, self.suffix, *after, self.middle, *before, *between, *end]

    @property
    def markers(self) -> set[int]:
        """Ids that training must not replace."""
        return {self.prefix, self.suffix, self.middle}
