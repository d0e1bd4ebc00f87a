"""Prompts that share text with those that benchmarks report on.

What learned from them says little there, so trainings do without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hf_spec.common.prompts import Prompt, load_prompts

# So many words in a row are no accident, as in the overlaps that Brown et al. 2020 (arXiv
# 2005.14165, appendix C) looked for. A shorter text counts whole.
RUN = 13
Words = tuple[str, ...]


def apart_from_reported(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those of `prompts` that share no run of words with the prompts of the package."""
    reported = {run for prompt in load_prompts() for run in _runs(prompt)}
    return [prompt for prompt in prompts if reported.isdisjoint(_runs(prompt))]


def _runs(prompt: Prompt) -> Iterator[Words]:
    for text in prompt.turns:
        words = tuple(re.findall(r"\w+", text.lower()))
        for begin in range(max(1, len(words) - RUN + 1)):
            yield words[begin : begin + RUN]
